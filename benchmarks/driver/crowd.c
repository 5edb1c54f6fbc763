/* Many clients in one thread, each with one request under way: what a server does for a crowd.
 *
 *     crowd FRAMING SERVER CONNECTIONS MILLISECONDS
 *
 * Nothing here knows a protocol beyond where an answer ends (FRAMING: kafka or zmq), so that a request
 * costs this side a write, a read and next to nothing else, and leaves the processor to the server. The
 * caller says on standard input what is sent, each a line in hexadecimal: how every payload of an answer
 * must begin; then the requests, framed, one for each connection, from the first again where there are
 * more connections. An answer that begins otherwise ends the program, with the answer on stderr. Prints
 * one JSON object, of the time after a tenth of it has passed.
 */

#include "common.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { ANSWER_BYTES = 65536, EVENTS = 64, PATIENCE_MS = 30000, LINE_BYTES = 1 << 20 };

typedef struct {
    unsigned char *bytes;
    size_t size;
} Bytes;

/* Where the first answer of what was received ends, 0 while it is not whole; and its payload. */
typedef size_t (*Framing)(const unsigned char *received, size_t size, Bytes *payload);

typedef struct {
    int peer;
    Bytes request;
    size_t received;
    unsigned char answer[ANSWER_BYTES];
} Client;

/* --- framing ------------------------------------------------------------------------------- */

static size_t kafka_answer(const unsigned char *received, size_t size, Bytes *payload) {
    if (size < 4)
        return 0;
    size_t length = (size_t)received[0] << 24 | received[1] << 16 | received[2] << 8 | received[3];
    *payload = (Bytes){(unsigned char *)received + 4, length};
    return size < 4 + length ? 0 : 4 + length;
}

/* A message of ZMTP 3: frames, of which the last is the payload. */
static size_t zmq_answer(const unsigned char *received, size_t size, Bytes *payload) {
    enum { MORE = 1, LONG = 2 };
    size_t at = 0;
    for (;;) {
        size_t head = at < size && received[at] & LONG ? 9 : 2, length = 0;
        if (size < at + head)
            return 0;
        for (size_t digit = at + 1; digit < at + head; digit++)
            length = length << 8 | received[digit];
        if (length > ANSWER_BYTES || size < at + head + length)
            return 0;
        *payload = (Bytes){(unsigned char *)received + at + head, length};
        bool more = received[at] & MORE;
        at += head + length;
        if (!more)
            return at;
    }
}

/* --- hello --------------------------------------------------------------------------------- */

static void write_all(int peer, const void *bytes, size_t size) {
    if (write(peer, bytes, size) != (ssize_t)size)
        fail("not sent: %s", strerror(errno));
}

static void read_all(int peer, unsigned char *bytes, size_t size) {
    for (size_t got = 0; got < size;) {
        ssize_t more = read(peer, bytes + got, size - got);
        if (more <= 0)
            fail("no hello: %s", more ? strerror(errno) : "it hung up");
        got += more;
    }
}

static void no_hello(int peer) { (void)peer; }

/* The greeting of ZMTP 3.0 without security, and READY as a REQ socket; the same from the other side. */
static void zmq_hello(int peer) {
    static const unsigned char greeting[64] = {0xFF, [9] = 0x7F, 3, 0, 'N', 'U', 'L', 'L'};
    static const unsigned char ready[] = "\x04\x19\x05READY\x0bSocket-Type\0\0\0\3REQ";
    unsigned char answer[256];
    write_all(peer, greeting, sizeof greeting);
    write_all(peer, ready, sizeof ready - 1);
    read_all(peer, answer, sizeof greeting);
    read_all(peer, answer, 2);
    read_all(peer, answer, answer[1]);
}

static const struct {
    const char *name;
    Framing framing;
    void (*hello)(int peer);
} protocols[] = {{"kafka", kafka_answer, no_hello}, {"zmq", zmq_answer, zmq_hello}, {NULL, NULL, NULL}};

/* --- the crowd ----------------------------------------------------------------------------- */

static Bytes line_of_hexadecimal(void) {
    static char line[LINE_BYTES];
    if (!fgets(line, sizeof line, stdin))
        return (Bytes){NULL, 0};
    size_t size = strcspn(line, "\n") / 2;
    Bytes read = {allocated(size + 1, 1), size};
    for (size_t at = 0; at < size; at++)
        if (sscanf(line + 2 * at, "%2hhx", read.bytes + at) != 1)
            fail("what is to be sent comes in hexadecimal");
    return read;
}

static void ask(Client *client) { write_all(client->peer, client->request.bytes, client->request.size); }

static void check(Bytes answer, Bytes expected) {
    if (answer.size < expected.size || memcmp(answer.bytes, expected.bytes, expected.size))
        fail("another answer than expected: %.*s", (int)answer.size, answer.bytes);
}

/* What has come for a client; whether its answer is whole. */
static bool take(Client *client, Framing framing, Bytes expected) {
    ssize_t more = read(client->peer, client->answer + client->received, ANSWER_BYTES - client->received);
    if (more <= 0)
        fail("no answer: %s", more ? strerror(errno) : "it hung up");
    client->received += more;
    Bytes payload;
    size_t end = framing(client->answer, client->received, &payload);
    if (!end && client->received == ANSWER_BYTES)
        fail("an answer is larger than %d bytes", ANSWER_BYTES);
    if (!end)
        return false;
    if (end != client->received)
        fail("more than one answer to one request");
    check(payload, expected);
    client->received = 0;
    return true;
}

static void crowd(Client *clients, int64_t count, int64_t ms, Framing framing, Bytes expected) {
    int poll = epoll_create1(0);
    for (int64_t at = 0; at < count; at++) {
        struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = &clients[at]};
        if (epoll_ctl(poll, EPOLL_CTL_ADD, clients[at].peer, &wanted))
            fail("cannot wait for answers: %s", strerror(errno));
        ask(&clients[at]);
    }
    int64_t counted_from = now_ns() + ms * 100000, end = now_ns() + ms * 1000000, answers = -1;
    Start begun = {0};
    while (now_ns() < end) {
        struct epoll_event events[EVENTS];
        int ready = epoll_wait(poll, events, EVENTS, PATIENCE_MS);
        if (ready <= 0)
            fail("nothing came for %d s", PATIENCE_MS / 1000);
        if (answers < 0 && now_ns() >= counted_from)
            begun = start(), answers = 0;
        for (int at = 0; at < ready; at++) {
            Client *client = events[at].data.ptr;
            if (!take(client, framing, expected))
                continue;
            answers += answers >= 0;
            ask(client);
        }
    }
    print_load(begun, answers);
}

int main(int arguments, char **words) {
    if (arguments != 5)
        fail("crowd FRAMING SERVER CONNECTIONS MILLISECONDS");
    size_t protocol = 0;
    while (protocols[protocol].name && strcmp(protocols[protocol].name, words[1]))
        protocol++;
    if (!protocols[protocol].name)
        fail("%s is no framing", words[1]);
    int64_t count = number(words[3]), requests = 0;
    Client *clients = allocated(count, sizeof *clients);
    Bytes expected = line_of_hexadecimal(), request;
    for (; requests < count && (request = line_of_hexadecimal()).bytes; requests++)
        clients[requests].request = request;
    if (!requests)
        fail("there is nothing to send");
    for (int64_t at = 0; at < count; at++) {
        clients[at].request = clients[at % requests].request;
        clients[at].peer = connected(words[2]);
        protocols[protocol].hello(clients[at].peer);
    }
    crowd(clients, count, number(words[4]), protocols[protocol].framing, expected);
    fflush(stdout);
    _exit(0);
}
