/* The client of RabbitMQ streams: its stream protocol, spoken directly, since none of its clients is C.
 *
 *     frame     length: u32, key: u16, version: u16, then what the key says; answers have bit 15 set
 *     publish   publisher: u8, count: u32, {id: u64, length: u32, message} ...
 *     confirm   publisher: u8, count: u32, {id: u64} ...
 *     deliver   subscription: u8, chunk
 *     chunk     magic: u8, type: u8, entries: u16, records: u32, time: u64, epoch: u64, offset: u64,
 *               crc: u32, bytes: u32, trailer: u32, reserved: u32, {length: u32, message} ...
 *
 * All numbers are big-endian. A message is an AMQP 1.0 data section, as every client writes it. The
 * habits are those of the Java client: up to 100 messages in a frame, ten chunks in advance. There is
 * no thread and little work per message, so the client is unlikely to be the limit.
 */

#include "client.h"

#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { DECLARE_PUBLISHER = 1, PUBLISH, CONFIRM, PUBLISH_ERROR, SUBSCRIBE = 7, DELIVER, CREDIT, CREATE = 13 };
enum { PEER_PROPERTIES = 17, SASL_HANDSHAKE, SASL_AUTHENTICATE, TUNE, OPEN, HEARTBEAT = 23 };
enum { ANSWER = 0x8000, OK = 1, STREAM_EXISTS = 5, FROM_FIRST = 1 };
enum { FRAME_BYTES = 1 << 20, AT_ONCE = 100, CREDITS = 10, CHUNK_HEADER = 48, SECTION_HEADER = 8 };

/* A connection, with the frame that is being written and what was received beyond the last one. */
typedef struct {
    int socket;
    unsigned char *out, *in;
    size_t written, taken, received, room;
    uint32_t requests;
} Peer;

struct Sender {
    Peer peer;
    bool batched;
    int64_t sent, acknowledged;
    uint32_t in_frame;
};

struct Reader {
    Peer peer;
};

typedef struct {
    const unsigned char *at, *end;
    uint16_t key;
} Frame;

/* --- writing ------------------------------------------------------------------------------- */

static void put(Peer *peer, const void *bytes, size_t count) {
    if (peer->written + count > FRAME_BYTES)
        fail("more than a frame may hold");
    memcpy(peer->out + peer->written, bytes, count);
    peer->written += count;
}

static void put_u8(Peer *peer, uint8_t value) { put(peer, &value, sizeof value); }
static void put_u16(Peer *peer, uint16_t value) { put(peer, &(uint16_t){htobe16(value)}, sizeof value); }
static void put_u32(Peer *peer, uint32_t value) { put(peer, &(uint32_t){htobe32(value)}, sizeof value); }
static void put_u64(Peer *peer, uint64_t value) { put(peer, &(uint64_t){htobe64(value)}, sizeof value); }

static void put_text(Peer *peer, const char *text) {
    put_u16(peer, strlen(text));
    put(peer, text, strlen(text));
}

static void begin_frame(Peer *peer, uint16_t key) {
    peer->written = 0;
    put_u32(peer, 0); /* the length, once it is known */
    put_u16(peer, key);
    put_u16(peer, 1);
}

static void begin_request(Peer *peer, uint16_t key) {
    begin_frame(peer, key);
    put_u32(peer, ++peer->requests);
}

static void send_frame(Peer *peer) {
    uint32_t length = htobe32(peer->written - sizeof length);
    memcpy(peer->out, &length, sizeof length);
    for (size_t at = 0; at < peer->written;) {
        ssize_t count = send(peer->socket, peer->out + at, peer->written - at, MSG_NOSIGNAL);
        if (count < 0)
            fail("not sent: %s", strerror(errno));
        at += count;
    }
    peer->written = 0;
}

/* --- reading ------------------------------------------------------------------------------- */

static const unsigned char *take(Frame *frame, size_t count) {
    if ((size_t)(frame->end - frame->at) < count)
        fail("a frame that is too short");
    frame->at += count;
    return frame->at - count;
}

static uint16_t take_u16(Frame *frame) {
    uint16_t value;
    memcpy(&value, take(frame, sizeof value), sizeof value);
    return be16toh(value);
}

static uint32_t take_u32(Frame *frame) {
    uint32_t value;
    memcpy(&value, take(frame, sizeof value), sizeof value);
    return be32toh(value);
}

/* Receive some more, if anything comes in time. */
static bool receive(Peer *peer, int wait_ms) {
    if (peer->taken) {
        memmove(peer->in, peer->in + peer->taken, peer->received - peer->taken);
        peer->received -= peer->taken;
        peer->taken = 0;
    }
    if (peer->received == peer->room && !(peer->in = realloc(peer->in, peer->room *= 2)))
        fail("no memory");
    struct pollfd ready = {.fd = peer->socket, .events = POLLIN};
    if (poll(&ready, 1, wait_ms) == 0)
        return false;
    ssize_t count = recv(peer->socket, peer->in + peer->received, peer->room - peer->received, 0);
    if (count <= 0)
        fail("the connection ended: %s", count ? strerror(errno) : "closed by the server");
    peer->received += count;
    return true;
}

/* A whole frame that is there already; it is good until the next call. */
static bool next_frame(Peer *peer, Frame *frame) {
    uint32_t length;
    size_t there = peer->received - peer->taken;
    if (there < sizeof length)
        return false;
    memcpy(&length, peer->in + peer->taken, sizeof length);
    length = be32toh(length);
    if (there < sizeof length + length)
        return false;
    const unsigned char *begin = peer->in + peer->taken + sizeof length;
    *frame = (Frame){begin, begin + length, 0};
    peer->taken += sizeof length + length;
    frame->key = take_u16(frame);
    take_u16(frame);
    return true;
}

static Frame await(Peer *peer, uint16_t key) {
    Frame frame;
    for (;;) {
        while (!next_frame(peer, &frame))
            if (!receive(peer, PATIENCE_S * 1000))
                fail("no answer to request %d", key & ~ANSWER);
        if (frame.key == key)
            return frame;
    }
}

/* Send the request that was written and see what it came to. */
static uint16_t result(Peer *peer, uint16_t key) {
    send_frame(peer);
    Frame frame = await(peer, key | ANSWER);
    take_u32(&frame);
    return take_u16(&frame);
}

static void ask(Peer *peer, uint16_t key) {
    uint16_t code = result(peer, key);
    if (code != OK)
        fail("request %d was answered with code %d", key, code);
}

/* --- connecting ---------------------------------------------------------------------------- */

static void authenticate(Peer *peer) {
    static const char plain[] = "\0guest\0guest";
    begin_request(peer, SASL_HANDSHAKE);
    ask(peer, SASL_HANDSHAKE);
    begin_request(peer, SASL_AUTHENTICATE);
    put_text(peer, "PLAIN");
    put_u32(peer, sizeof plain - 1);
    put(peer, plain, sizeof plain - 1);
    ask(peer, SASL_AUTHENTICATE);
}

static Peer connection(const char *server) {
    Peer peer = {.socket = connected(server), .out = allocated(FRAME_BYTES, 1), .room = 2 * FRAME_BYTES};
    peer.in = allocated(peer.room, 1);
    begin_request(&peer, PEER_PROPERTIES);
    put_u32(&peer, 0);
    ask(&peer, PEER_PROPERTIES);
    authenticate(&peer);
    await(&peer, TUNE);
    begin_frame(&peer, TUNE);
    put_u32(&peer, FRAME_BYTES);
    put_u32(&peer, 0); /* no heartbeats */
    send_frame(&peer);
    begin_request(&peer, OPEN);
    put_text(&peer, "/");
    ask(&peer, OPEN);
    return peer;
}

/* --- client.h ------------------------------------------------------------------------------ */

Sender *sender_new(const char *server, const char *topic, bool batched) {
    Sender *sender = allocated(1, sizeof *sender);
    *sender = (Sender){.peer = connection(server), .batched = batched};
    Peer *peer = &sender->peer;
    begin_request(peer, CREATE);
    put_text(peer, topic);
    put_u32(peer, 0); /* no arguments: all defaults */
    uint16_t code = result(peer, CREATE);
    if (code != OK && code != STREAM_EXISTS)
        fail("the stream could not be made: code %d", code);
    begin_request(peer, DECLARE_PUBLISHER);
    put_u8(peer, 0);
    put_text(peer, ""); /* without a name, nothing is looked for twice */
    put_text(peer, topic);
    ask(peer, DECLARE_PUBLISHER);
    return sender;
}

static void flush(Sender *sender) {
    if (!sender->in_frame)
        return;
    uint32_t count = htobe32(sender->in_frame);
    memcpy(sender->peer.out + 9, &count, sizeof count); /* after length, key, version, publisher */
    send_frame(&sender->peer);
    sender->in_frame = 0;
}

static void take_confirms(Sender *sender) {
    Frame frame;
    while (next_frame(&sender->peer, &frame)) {
        if (frame.key == PUBLISH_ERROR)
            fail("not delivered");
        if (frame.key != CONFIRM)
            continue;
        take(&frame, 1);
        sender->acknowledged += take_u32(&frame);
    }
}

void sender_send(Sender *sender, const char *value, size_t bytes) {
    Peer *peer = &sender->peer;
    if (sender->in_frame && peer->written + bytes + 64 > FRAME_BYTES)
        flush(sender);
    if (!sender->in_frame) {
        begin_frame(peer, PUBLISH);
        put_u8(peer, 0);
        put_u32(peer, 0); /* the count, once it is known */
    }
    put_u64(peer, sender->sent++);
    put_u32(peer, SECTION_HEADER + bytes);
    put(peer, "\x00\x53\x75\xb0", 4);
    put_u32(peer, bytes);
    put(peer, value, bytes);
    if (++sender->in_frame >= (sender->batched ? AT_ONCE : 1))
        flush(sender);
    while (sender->sent - sender->acknowledged >= IN_FLIGHT) {
        flush(sender);
        if (!receive(peer, PATIENCE_S * 1000))
            fail("no confirmation");
        take_confirms(sender);
    }
}

int64_t sender_acknowledged(Sender *sender, bool wait) {
    if (wait)
        flush(sender);
    take_confirms(sender);
    if (receive(&sender->peer, wait && sender->acknowledged < sender->sent ? POLL_MS : 0))
        take_confirms(sender);
    return sender->acknowledged;
}

Reader *reader_new(const char *server, const char *topic) {
    Reader *reader = allocated(1, sizeof *reader);
    reader->peer = connection(server);
    Peer *peer = &reader->peer;
    begin_request(peer, SUBSCRIBE);
    put_u8(peer, 0);
    put_text(peer, topic);
    put_u16(peer, FROM_FIRST);
    put_u16(peer, CREDITS);
    put_u32(peer, 0); /* no properties */
    ask(peer, SUBSCRIBE);
    return reader;
}

static int64_t messages_in(Frame *frame, int64_t *stamp) {
    take(frame, 1 + 2);
    uint16_t entries = take_u16(frame);
    take(frame, CHUNK_HEADER - 4);
    for (uint16_t at = 0; at < entries; at++) {
        uint32_t length = take_u32(frame);
        const unsigned char *message = take(frame, length);
        if (length < SECTION_HEADER)
            fail("a message that nobody sent");
        *stamp = stamp_of(message + SECTION_HEADER, length - SECTION_HEADER);
    }
    return entries;
}

int64_t reader_read(Reader *reader, int64_t *stamp) {
    Peer *peer = &reader->peer;
    Frame frame;
    int64_t count = 0;
    while (count < READ_AT_ONCE) {
        if (!next_frame(peer, &frame)) {
            if (count || !receive(peer, POLL_MS))
                break;
            continue;
        }
        if (frame.key != DELIVER)
            continue;
        count += messages_in(&frame, stamp);
        begin_frame(peer, CREDIT); /* for one chunk more */
        put_u8(peer, 0);
        put_u16(peer, 1);
        send_frame(peer);
    }
    return count;
}

const char *client_name(void) { return "none: the stream protocol spoken from C"; }

const Command client_commands[] = {{NULL, 0, NULL}};
