/* A load driver: what a client in C asks of a broker, and what that costs the client.
 *
 *     produce   SERVER TOPIC MESSAGES BYTES          as fast as it goes, batched as the client does it
 *     consume   SERVER TOPIC MESSAGES                from the beginning
 *     latency   SERVER TOPIC MESSAGES BYTES          un-batched: one in flight
 *     endtoend  SERVER TOPIC MESSAGES BYTES          one in flight, from its sending to its reading
 *     fanout    SERVER TOPIC MESSAGES BYTES READERS  readers that wait at the end while one sends
 *     first     SERVER TOPIC                         one message, acknowledged
 *     client                                         which library it is, as plain text
 *     sync      FILE WRITES BYTES                    no broker: write over a file, fdatasync each
 *
 * and what the client that it is linked with offers beyond that (client.h). Each but `client`
 * prints one JSON object and ends. CPU seconds are those of this process between the first and the
 * last message, all threads, user and system. The topic of endtoend and fanout must be new.
 */

#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { ACKNOWLEDGE_EVERY = 1000 };

char **options;

/* --- time ---------------------------------------------------------------------------------- */

static int ascending(const void *left, const void *right) {
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

static void print_latencies(Start begun, int64_t *ns, int64_t count) {
    double seconds = (now_ns() - begun.wall_ns) / 1e9, cpu = cpu_seconds() - begun.cpu;
    qsort(ns, count, sizeof *ns, ascending);
    printf("{\"messages\": %" PRId64 ", \"seconds\": %.6f, \"cpu_seconds\": %.6f, \"p50_us\": %.1f, "
           "\"p90_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f}\n",
           count, seconds, cpu, ns[count / 2] / 1e3, ns[count * 9 / 10] / 1e3, ns[count * 99 / 100] / 1e3,
           ns[count - 1] / 1e3);
}

/* Whoever waits for something calls this over and over, with how much of it there is so far. */
typedef struct {
    int64_t seen, since_ns;
} Patience;

static void still_moving(Patience *patience, int64_t seen, int64_t wanted, const char *what) {
    if (seen != patience->seen || !patience->since_ns)
        *patience = (Patience){seen, now_ns()};
    else if (now_ns() - patience->since_ns > PATIENCE_S * 1000000000LL)
        fail("%" PRId64 " of %" PRId64 " were %s", seen, wanted, what);
}

/* --- sending ------------------------------------------------------------------------------- */

static void wait_for(Sender *sender, int64_t messages) {
    Patience patience = {0};
    int64_t acknowledged;
    while ((acknowledged = sender_acknowledged(sender, true)) < messages)
        still_moving(&patience, acknowledged, messages, "acknowledged");
}

static void send_many(Sender *sender, const char *value, size_t bytes, int64_t messages) {
    for (int64_t sent = 0; sent < messages; sent++) {
        sender_send(sender, value, bytes);
        if (sent % ACKNOWLEDGE_EVERY == 0)
            sender_acknowledged(sender, false);
    }
}

static void produce(char **operands) {
    Sender *sender = sender_new(operands[0], operands[1], true);
    int64_t messages = number(operands[2]);
    size_t bytes = number(operands[3]);
    char *value = value_of(bytes);
    sender_send(sender, value, bytes); /* connects */
    wait_for(sender, 1);
    Start begun = start();
    send_many(sender, value, bytes, messages);
    wait_for(sender, 1 + messages);
    print_load(begun, messages);
}

static void first(char **operands) {
    Start begun = start();
    Sender *sender = sender_new(operands[0], operands[1], false);
    sender_send(sender, "quack", 5);
    wait_for(sender, 1);
    print_load(begun, 1);
}

static void latency(char **operands) {
    Sender *sender = sender_new(operands[0], operands[1], false);
    int64_t messages = number(operands[2]), warm_up = messages / 10 + 1;
    size_t bytes = number(operands[3]);
    char *value = value_of(bytes);
    int64_t *ns = allocated(messages, sizeof *ns);
    Start begun = start();
    for (int64_t sent = -warm_up; sent < messages; sent++) {
        if (sent == 0)
            begun = start();
        int64_t before = now_ns();
        sender_send(sender, value, bytes);
        wait_for(sender, warm_up + sent + 1);
        if (sent >= 0)
            ns[sent] = now_ns() - before;
    }
    print_latencies(begun, ns, messages);
}

/* --- reading ------------------------------------------------------------------------------- */

/* From the first messages on: finding broker, topic and offset is not measured. */
static void consume(char **operands) {
    Reader *reader = reader_new(operands[0], operands[1]);
    int64_t messages = number(operands[2]), unmeasured = 0, got = 0, stamp;
    Patience patience = {0};
    Start begun = {0};
    while (got < messages) {
        got += reader_read(reader, &stamp);
        if (!unmeasured && got)
            begun = start(), unmeasured = got;
        still_moving(&patience, got, messages, "consumed");
    }
    if (got == unmeasured)
        fail("all %" PRId64 " messages came at once, which leaves none to measure", got);
    print_load(begun, got - unmeasured);
}

/* A thread that reads until the program ends. */
typedef struct {
    Reader *reader;
    int64_t ns; /* between the sending of the last message and its reading */
    atomic_int_least64_t got;
} Reading;

static pthread_mutex_t reading = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t something_read = PTHREAD_COND_INITIALIZER;

static void *read_on(void *argument) {
    Reading *mine = argument;
    for (;;) {
        int64_t stamp, count = reader_read(mine->reader, &stamp);
        if (!count)
            continue;
        mine->ns = now_ns() - stamp;
        pthread_mutex_lock(&reading);
        mine->got += count;
        pthread_cond_signal(&something_read);
        pthread_mutex_unlock(&reading);
    }
    return NULL;
}

static void begin_reading(Reading *mine, const char *server, const char *topic) {
    pthread_t thread;
    mine->reader = reader_new(server, topic);
    if (pthread_create(&thread, NULL, read_on, mine))
        fail("no thread for a reader");
}

/* Until each of the readers has so many. */
static void wait_for_readers(Reading *readers, int64_t count, int64_t messages) {
    Patience patience = {0};
    pthread_mutex_lock(&reading);
    for (;;) {
        int64_t got = 0, done = 0;
        for (int64_t at = 0; at < count; at++)
            got += readers[at].got, done += readers[at].got >= messages;
        if (done == count)
            break;
        still_moving(&patience, got, messages * count, "read");
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec++;
        pthread_cond_timedwait(&something_read, &reading, &until);
    }
    pthread_mutex_unlock(&reading);
}

static void end_to_end(char **operands) {
    Sender *sender = sender_new(operands[0], operands[1], false);
    Reading mine = {0};
    begin_reading(&mine, operands[0], operands[1]);
    int64_t messages = number(operands[2]), warm_up = messages / 10 + 1;
    size_t bytes = number(operands[3]);
    char *value = value_of(bytes);
    int64_t *ns = allocated(messages, sizeof *ns), now;
    if (bytes < sizeof now)
        fail("a message needs room for the time");
    Start begun = start();
    for (int64_t sent = -warm_up; sent < messages; sent++) {
        if (sent == 0)
            begun = start();
        now = now_ns();
        memcpy(value, &now, sizeof now);
        sender_send(sender, value, bytes);
        wait_for(sender, warm_up + sent + 1);
        wait_for_readers(&mine, 1, warm_up + sent + 1);
        if (sent >= 0)
            ns[sent] = mine.ns;
    }
    print_latencies(begun, ns, messages);
}

static void fan_out(char **operands) {
    Sender *sender = sender_new(operands[0], operands[1], true);
    int64_t messages = number(operands[2]), count = number(operands[4]);
    size_t bytes = number(operands[3]);
    char *value = value_of(bytes);
    Reading *readers = allocated(count, sizeof *readers);
    for (int64_t at = 0; at < count; at++)
        begin_reading(&readers[at], operands[0], operands[1]);
    sender_send(sender, value, bytes);
    wait_for(sender, 1);
    wait_for_readers(readers, count, 1); /* all of them stand at the end */
    Start begun = start();
    send_many(sender, value, bytes, messages);
    wait_for(sender, 1 + messages);
    wait_for_readers(readers, count, 1 + messages);
    print_load(begun, messages * count);
}

/* --- the bare disk ------------------------------------------------------------------------- */

/* Over bytes that are there: the file's length and blocks stay as they are. */
static void sync_each(char **operands) {
    const char *path = operands[0];
    int64_t writes = number(operands[1]);
    size_t bytes = number(operands[2]);
    int file = open(path, O_RDWR | O_CREAT, 0640);
    if (file < 0)
        fail("%s: %s", path, strerror(errno));
    char *value = value_of(bytes);
    for (int64_t at = 0; at < writes; at++)
        if (pwrite(file, value, bytes, at * bytes) != (ssize_t)bytes)
            fail("%s: %s", path, strerror(errno));
    fsync(file);
    int64_t *ns = allocated(writes, sizeof *ns);
    Start begun = start();
    for (int64_t at = 0; at < writes; at++) {
        int64_t before = now_ns();
        if (pwrite(file, value, bytes, at * bytes) != (ssize_t)bytes || fdatasync(file))
            fail("%s: %s", path, strerror(errno));
        ns[at] = now_ns() - before;
    }
    print_latencies(begun, ns, writes);
}

/* ------------------------------------------------------------------------------------------- */

static void name_client(char **operands) {
    (void)operands;
    puts(client_name());
}

static const Command commands[] = {{"produce", 4, produce}, {"consume", 3, consume},
                                   {"latency", 4, latency}, {"endtoend", 4, end_to_end},
                                   {"fanout", 5, fan_out},  {"first", 2, first},
                                   {"sync", 3, sync_each},  {"client", 0, name_client},
                                   {NULL, 0, NULL}};

static const Command *find(const Command *among, const char *name) {
    for (; among->name; among++)
        if (!strcmp(among->name, name))
            return among;
    return NULL;
}

int main(int count, char **arguments) {
    const Command *command = NULL;
    if (count > 1 && !(command = find(commands, arguments[1])))
        command = find(client_commands, arguments[1]);
    if (!command || count < 2 + command->operands)
        fail("a command and its operands, as written on top of loads.c");
    options = arguments + 2 + command->operands;
    command->run(arguments + 2);
    fflush(stdout);
    _exit(0); /* what was fetched ahead need not be put away, and readers still read */
}
