/* The client of NATS JetStream: the C client of its makers.
 *
 * Batched, messages are published asynchronously, at most IN_FLIGHT of them unacknowledged; un-batched,
 * each is a request of its own. A reader is an ordered consumer, to which the server pushes without
 * waiting for acknowledgements. The stream lies in files, and holds one subject of its own name.
 */

#include "client.h"

#include <nats/nats.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

struct Sender {
    jsCtx *stream;
    const char *topic;
    bool batched;
    int64_t sent;
    atomic_int_least64_t acknowledged;
};

struct Reader {
    natsSubscription *subscription;
};

static void check(natsStatus status, const char *what) {
    if (status != NATS_OK)
        fail("%s: %s, %s", what, natsStatus_GetText(status), nats_GetLastError(NULL));
}

static void on_acknowledgement(jsCtx *stream, natsMsg *message, jsPubAck *good, jsPubAckErr *bad, void *of) {
    (void)stream;
    if (!good)
        fail("not delivered: %s", bad ? bad->ErrText : "no reason given");
    ((Sender *)of)->acknowledged++;
    natsMsg_Destroy(message);
}

static jsCtx *stream_on(const char *server, Sender *sender) {
    natsOptions *connecting;
    natsConnection *connection;
    jsCtx *stream;
    jsOptions settings;
    char address[TOPIC_BYTES];
    snprintf(address, sizeof address, "nats://%s", server);
    check(natsOptions_Create(&connecting), "options");
    check(natsOptions_SetURL(connecting, address), address);
    check(natsOptions_SetAllowReconnect(connecting, false), "options");
    /* Otherwise a thread of the library sends what there is, some time later. */
    check(natsOptions_SetSendAsap(connecting, sender && !sender->batched), "options");
    check(natsConnection_Connect(&connection, connecting), "connecting");
    jsOptions_Init(&settings);
    settings.Wait = PATIENCE_S * 1000;
    settings.PublishAsync.MaxPending = IN_FLIGHT;
    settings.PublishAsync.StallWait = PATIENCE_S * 1000;
    settings.PublishAsync.AckHandler = on_acknowledgement;
    settings.PublishAsync.AckHandlerClosure = sender;
    check(natsConnection_JetStream(&stream, connection, &settings), "JetStream");
    return stream;
}

Sender *sender_new(const char *server, const char *topic, bool batched) {
    Sender *sender = allocated(1, sizeof *sender);
    sender->topic = topic;
    sender->batched = batched;
    sender->stream = stream_on(server, sender);
    jsStreamConfig made;
    jsStreamConfig_Init(&made);
    made.Name = topic;
    made.Subjects = (const char *[]){topic};
    made.SubjectsLen = 1;
    made.Storage = js_FileStorage;
    check(js_AddStream(NULL, sender->stream, &made, NULL, NULL), "making the stream");
    return sender;
}

void sender_send(Sender *sender, const char *value, size_t bytes) {
    sender->sent++;
    if (sender->batched) {
        check(js_PublishAsync(sender->stream, sender->topic, value, bytes, NULL), "sending");
        return;
    }
    jsPubAck *acknowledgement;
    check(js_Publish(&acknowledgement, sender->stream, sender->topic, value, bytes, NULL, NULL), "sending");
    jsPubAck_Destroy(acknowledgement);
    sender->acknowledged++;
}

int64_t sender_acknowledged(Sender *sender, bool wait) {
    if (wait && sender->acknowledged < sender->sent) {
        jsPubOptions settings;
        jsPubOptions_Init(&settings);
        settings.MaxWait = POLL_MS;
        natsStatus status = js_PublishAsyncComplete(sender->stream, &settings);
        if (status != NATS_TIMEOUT)
            check(status, "waiting");
    }
    return sender->acknowledged;
}

Reader *reader_new(const char *server, const char *topic) {
    Reader *reader = allocated(1, sizeof *reader);
    jsSubOptions settings;
    jsSubOptions_Init(&settings);
    settings.Ordered = true;
    check(js_SubscribeSync(&reader->subscription, stream_on(server, NULL), topic, NULL, &settings, NULL),
          "subscribing");
    check(natsSubscription_SetPendingLimits(reader->subscription, -1, -1), "limits");
    return reader;
}

int64_t reader_read(Reader *reader, int64_t *stamp) {
    int64_t count = 0;
    int waiting = 1;
    for (; count < waiting && count < READ_AT_ONCE; count++) {
        natsMsg *message;
        natsStatus status = natsSubscription_NextMsg(&message, reader->subscription, POLL_MS);
        if (status == NATS_TIMEOUT)
            break;
        check(status, "reading");
        *stamp = stamp_of(natsMsg_GetData(message), natsMsg_GetDataLength(message));
        natsMsg_Destroy(message);
        if (count == 0 && natsSubscription_GetPending(reader->subscription, &waiting, NULL) == NATS_OK)
            waiting++;
    }
    return count;
}

const char *client_name(void) {
    static char name[64];
    snprintf(name, sizeof name, "nats.c %s", nats_GetVersion());
    return name;
}

const Command client_commands[] = {{NULL, 0, NULL}};
