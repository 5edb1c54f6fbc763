/* The client of Kafka's protocol: librdkafka, with its defaults (linger.ms 0 where un-batched).
 *
 *     transactions  SERVER TOPIC MESSAGES BYTES EACH  transactions of EACH messages
 *     batches       SERVER TOPIC MESSAGES BYTES EACH  the same without: EACH sent, then all awaited
 *     idle          SERVER CONNECTIONS                each says hello and then nothing
 *     groups        SERVER TOPIC GROUPS               each a consumer of TOPIC-N, which stays quiet
 *
 * The last two print `ready` when all of them are connected, and stay until their standard input
 * ends; then they print what they cost.
 */

#include "client.h"

#include <errno.h>
#include <inttypes.h>
#include <librdkafka/rdkafka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

struct Sender {
    rd_kafka_t *client;
    rd_kafka_topic_t *topic;
    int64_t acknowledged;
};

struct Reader {
    rd_kafka_topic_t *topic;
    rd_kafka_message_t *messages[READ_AT_ONCE];
};

/* --- clients of the library ---------------------------------------------------------------- */

static void set(rd_kafka_conf_t *conf, const char *name, const char *value) {
    char error[512];
    if (rd_kafka_conf_set(conf, name, value, error, sizeof error) != RD_KAFKA_CONF_OK)
        fail("%s", error);
}

static void on_error(rd_kafka_t *client, int code, const char *reason, void *opaque) {
    (void)client, (void)opaque;
    fail("%s: %s", rd_kafka_err2name(code), reason);
}

static void on_delivery(rd_kafka_t *client, const rd_kafka_message_t *message, void *opaque) {
    (void)client;
    if (message->err)
        fail("not delivered: %s", rd_kafka_err2str(message->err));
    ((Sender *)opaque)->acknowledged++;
}

static rd_kafka_conf_t *configuration(const char *server) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    set(conf, "bootstrap.servers", server);
    rd_kafka_conf_set_error_cb(conf, on_error);
    return conf;
}

static rd_kafka_t *client(rd_kafka_type_t type, rd_kafka_conf_t *conf) {
    char error[512];
    for (char **option = options; *option; option++) {
        char *equals = strchr(*option, '=');
        if (!equals)
            fail("%s is not NAME=VALUE", *option);
        char *name = strndup(*option, equals - *option);
        set(conf, name, equals + 1);
        free(name);
    }
    rd_kafka_t *made = rd_kafka_new(type, conf, error, sizeof error);
    if (!made)
        fail("%s", error);
    return made;
}

/* The topic, which comes to life by being asked for. */
static rd_kafka_topic_t *found(rd_kafka_t *producer, const char *topic_name) {
    rd_kafka_topic_t *topic = rd_kafka_topic_new(producer, topic_name, NULL);
    const struct rd_kafka_metadata *metadata;
    rd_kafka_resp_err_t error = rd_kafka_metadata(producer, 0, topic, &metadata, PATIENCE_S * 1000);
    if (error)
        fail("no metadata: %s", rd_kafka_err2str(error));
    rd_kafka_metadata_destroy(metadata);
    return topic;
}

static Sender *sender_with(rd_kafka_conf_t *conf, const char *topic) {
    Sender *sender = allocated(1, sizeof *sender);
    rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    rd_kafka_conf_set_opaque(conf, sender);
    sender->client = client(RD_KAFKA_PRODUCER, conf);
    sender->topic = found(sender->client, topic);
    return sender;
}

/* --- client.h ------------------------------------------------------------------------------ */

Sender *sender_new(const char *server, const char *topic, bool batched) {
    rd_kafka_conf_t *conf = configuration(server);
    if (!batched)
        set(conf, "linger.ms", "0");
    return sender_with(conf, topic);
}

void sender_send(Sender *sender, const char *value, size_t bytes) {
    while (rd_kafka_produce(sender->topic, 0, RD_KAFKA_MSG_F_COPY, (void *)value, bytes, NULL, 0, NULL)) {
        if (rd_kafka_last_error() != RD_KAFKA_RESP_ERR__QUEUE_FULL)
            fail("not sent: %s", rd_kafka_err2str(rd_kafka_last_error()));
        rd_kafka_poll(sender->client, POLL_MS);
    }
}

int64_t sender_acknowledged(Sender *sender, bool wait) {
    rd_kafka_poll(sender->client, wait ? POLL_MS : 0);
    return sender->acknowledged;
}

Reader *reader_new(const char *server, const char *topic) {
    Reader *reader = allocated(1, sizeof *reader);
    rd_kafka_t *made = client(RD_KAFKA_CONSUMER, configuration(server));
    reader->topic = rd_kafka_topic_new(made, topic, NULL);
    if (rd_kafka_consume_start(reader->topic, 0, RD_KAFKA_OFFSET_BEGINNING))
        fail("cannot consume: %s", rd_kafka_err2str(rd_kafka_last_error()));
    return reader;
}

/* The library's call for many waits until it has so many, so the first is awaited by itself. */
int64_t reader_read(Reader *reader, int64_t *stamp) {
    rd_kafka_message_t **messages = reader->messages;
    if (!(messages[0] = rd_kafka_consume(reader->topic, 0, POLL_MS)))
        return 0;
    ssize_t more = rd_kafka_consume_batch(reader->topic, 0, 0, messages + 1, READ_AT_ONCE - 1);
    ssize_t count = 1 + (more > 0 ? more : 0);
    for (ssize_t at = 0; at < count; at++) {
        if (messages[at]->err)
            fail("not consumed: %s", rd_kafka_message_errstr(messages[at]));
        *stamp = stamp_of(messages[at]->payload, messages[at]->len);
        rd_kafka_message_destroy(messages[at]);
    }
    return count;
}

/* --- in transactions ----------------------------------------------------------------------- */

static void done(rd_kafka_error_t *error) {
    if (error)
        fail("%s", rd_kafka_error_string(error));
}

static void in_pieces(char **operands, bool transactional) {
    rd_kafka_conf_t *conf = configuration(operands[0]);
    set(conf, "enable.idempotence", "true");
    if (transactional)
        set(conf, "transactional.id", operands[1]);
    Sender *sender = sender_with(conf, operands[1]);
    int64_t messages = number(operands[2]), each = number(operands[4]);
    size_t bytes = number(operands[3]);
    char *value = value_of(bytes);
    Start begun = {0};
    if (transactional)
        done(rd_kafka_init_transactions(sender->client, PATIENCE_S * 1000));
    for (int64_t sent = -each; sent < messages; sent += each) { /* the first piece warms up */
        if (sent == 0)
            begun = start();
        if (transactional)
            done(rd_kafka_begin_transaction(sender->client));
        for (int64_t at = 0; at < each; at++)
            sender_send(sender, value, bytes);
        if (transactional)
            done(rd_kafka_commit_transaction(sender->client, PATIENCE_S * 1000));
        else if (rd_kafka_flush(sender->client, PATIENCE_S * 1000))
            fail("not everything could be sent");
    }
    print_load(begun, messages / each * each);
}

static void transactions(char **operands) { in_pieces(operands, true); }

static void batches(char **operands) { in_pieces(operands, false); }

/* --- those that only stay ------------------------------------------------------------------ */

static void stay(void) {
    puts("ready");
    fflush(stdout);
    Start begun = start();
    while (getchar() != EOF)
        continue;
    print_load(begun, 0);
}

static void say_hello(int peer) {
    /* ApiVersions, version 0, correlation id 1, client id "idle". */
    static const unsigned char hello[] = {0, 0, 0, 14, 0, 18, 0, 0, 0, 0, 0, 1, 0, 4, 'i', 'd', 'l', 'e'};
    unsigned char answer[4096];
    if (write(peer, hello, sizeof hello) != (ssize_t)sizeof hello || read(peer, answer, sizeof answer) < 8)
        fail("no answer to hello: %s", strerror(errno));
}

static void idle(char **operands) {
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (int64_t at = 0, connections = number(operands[1]); at < connections; at++)
        say_hello(connected(operands[0]));
    stay();
}

/* Each has its own group and its own topic, and is ready when it has been given its partition. */
static void groups(char **operands) {
    const char *server = operands[0], *topic_prefix = operands[1];
    int64_t count = number(operands[2]);
    rd_kafka_t **members = allocated(count, sizeof *members);
    rd_kafka_t *maker = client(RD_KAFKA_PRODUCER, configuration(server));
    for (int64_t at = 0; at < count; at++) {
        char name[TOPIC_BYTES];
        snprintf(name, sizeof name, "%s-%" PRId64, topic_prefix, at);
        rd_kafka_topic_destroy(found(maker, name)); /* to subscribe does not create it */
        rd_kafka_conf_t *conf = configuration(server);
        /* Not the last run's group, whose member the broker may still wait for. */
        char group[sizeof name + 16];
        snprintf(group, sizeof group, "%s-%d", name, (int)getpid());
        set(conf, "group.id", group);
        members[at] = client(RD_KAFKA_CONSUMER, conf);
        rd_kafka_poll_set_consumer(members[at]);
        rd_kafka_topic_partition_list_t *topics = rd_kafka_topic_partition_list_new(1);
        rd_kafka_topic_partition_list_add(topics, name, RD_KAFKA_PARTITION_UA);
        rd_kafka_subscribe(members[at], topics);
        rd_kafka_topic_partition_list_destroy(topics);
    }
    rd_kafka_destroy(maker);
    int64_t begun = now_ns();
    for (int64_t at = 0; at < count;) {
        rd_kafka_topic_partition_list_t *assigned = NULL;
        rd_kafka_message_t *message = rd_kafka_consumer_poll(members[at], POLL_MS / 10);
        if (message)
            rd_kafka_message_destroy(message);
        rd_kafka_assignment(members[at], &assigned);
        if (assigned->cnt)
            at++;
        else if (now_ns() - begun > PATIENCE_S * 1000000000LL)
            fail("group %" PRId64 " was given no partition", at);
        rd_kafka_topic_partition_list_destroy(assigned);
    }
    stay();
}

const char *client_name(void) {
    static char name[64];
    snprintf(name, sizeof name, "librdkafka %s", rd_kafka_version_str());
    return name;
}

const Command client_commands[] = {{"transactions", 5, transactions},
                                   {"batches", 5, batches},
                                   {"idle", 2, idle},
                                   {"groups", 3, groups},
                                   {NULL, 0, NULL}};
