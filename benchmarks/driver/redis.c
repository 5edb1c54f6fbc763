/* The client of Redis Streams: hiredis, XADD pipelined and XREAD in large pieces.
 *
 * A sender has one connection and no thread of its own, like a reader: what is sent is answered in
 * the order of sending, so an acknowledgement is the next answer.
 */

#include "client.h"

#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

/* PIPELINED: commands that leave in one write. */
enum { PIPELINED = 500, ID_BYTES = 64 };

struct Sender {
    redisContext *server;
    const char *topic;
    bool batched;
    int64_t sent, written, acknowledged;
};

struct Reader {
    redisContext *server;
    const char *topic;
    char last[ID_BYTES];
};

static redisContext *connection(const char *server) {
    char host[64];
    unsigned port;
    if (sscanf(server, "%63[0-9.]:%u", host, &port) != 2)
        fail("%s is not a numeric HOST:PORT", server);
    redisContext *made = redisConnect(host, port);
    if (!made || made->err)
        fail("cannot connect to %s: %s", server, made ? made->errstr : "no memory");
    redisSetTimeout(made, (struct timeval){.tv_sec = PATIENCE_S});
    return made;
}

static redisReply *answer(redisContext *server) {
    redisReply *reply = NULL;
    if (redisGetReply(server, (void **)&reply) != REDIS_OK)
        fail("no answer: %s", server->errstr);
    if (reply->type == REDIS_REPLY_ERROR)
        fail("%s", reply->str);
    return reply;
}

static void write_out(Sender *sender) {
    for (int done = 0; !done;)
        if (redisBufferWrite(sender->server, &done) != REDIS_OK)
            fail("not sent: %s", sender->server->errstr);
    sender->written = sender->sent;
}

static void take_acknowledgements(Sender *sender, int64_t up_to) {
    while (sender->acknowledged < up_to) {
        freeReplyObject(answer(sender->server));
        sender->acknowledged++;
    }
}

Sender *sender_new(const char *server, const char *topic, bool batched) {
    Sender *sender = allocated(1, sizeof *sender);
    *sender = (Sender){.server = connection(server), .topic = topic, .batched = batched};
    return sender;
}

void sender_send(Sender *sender, const char *value, size_t bytes) {
    const char *words[] = {"XADD", sender->topic, "*", "v", value};
    size_t lengths[] = {4, strlen(sender->topic), 1, 1, bytes};
    if (redisAppendCommandArgv(sender->server, 5, words, lengths) != REDIS_OK)
        fail("not sent: %s", sender->server->errstr);
    sender->sent++;
    if (!sender->batched || sender->sent - sender->written >= PIPELINED)
        write_out(sender);
    if (sender->written - sender->acknowledged >= IN_FLIGHT)
        take_acknowledgements(sender, sender->acknowledged + PIPELINED);
}

int64_t sender_acknowledged(Sender *sender, bool wait) {
    if (wait) {
        write_out(sender);
        take_acknowledgements(sender, sender->sent);
    }
    return sender->acknowledged;
}

Reader *reader_new(const char *server, const char *topic) {
    Reader *reader = allocated(1, sizeof *reader);
    *reader = (Reader){.server = connection(server), .topic = topic, .last = "0-0"};
    return reader;
}

/* [[topic, [[id, ["v", value]], ...]]], or nil when nothing came in time. */
int64_t reader_read(Reader *reader, int64_t *stamp) {
    redisAppendCommand(reader->server, "XREAD COUNT %d BLOCK %d STREAMS %s %s", READ_AT_ONCE, POLL_MS,
                       reader->topic, reader->last);
    redisReply *reply = answer(reader->server);
    int64_t count = 0;
    if (reply->type == REDIS_REPLY_ARRAY) {
        const redisReply *entries = reply->element[0]->element[1];
        count = entries->elements;
        const redisReply *last = entries->element[count - 1], *value = last->element[1]->element[1];
        snprintf(reader->last, sizeof reader->last, "%s", last->element[0]->str);
        *stamp = stamp_of(value->str, value->len);
    }
    freeReplyObject(reply);
    return count;
}

const char *client_name(void) {
    static char name[64];
    snprintf(name, sizeof name, "hiredis %d.%d.%d", HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
    return name;
}

const Command client_commands[] = {{NULL, 0, NULL}};
