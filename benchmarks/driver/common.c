/* What every program here needs: to give up in words, memory, a connection, the time. */

#include "common.h"

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

void fail(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("driver: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    _exit(1); /* other threads may be in the middle of anything */
}

int64_t number(const char *text) {
    int64_t value = atoll(text);
    if (value < 1)
        fail("%s is no number from 1 on", text);
    return value;
}

void *allocated(size_t count, size_t bytes) {
    void *memory = count < INT32_MAX ? calloc(count, bytes) : NULL;
    if (!memory)
        fail("no memory");
    return memory;
}

char *value_of(size_t bytes) {
    char *value = allocated(bytes + 1, 1);
    unsigned seed = 1;
    for (size_t at = 0; at < bytes; at++)
        value[at] = rand_r(&seed);
    return value;
}

int64_t stamp_of(const void *value, size_t bytes) {
    int64_t stamp = 0;
    if (bytes >= sizeof stamp)
        memcpy(&stamp, value, sizeof stamp);
    return stamp;
}

int connected(const char *server) {
    struct sockaddr_in address = {.sin_family = AF_INET};
    char host[64];
    unsigned port;
    if (sscanf(server, "%63[0-9.]:%u", host, &port) != 2 || !inet_pton(AF_INET, host, &address.sin_addr))
        fail("%s is not a numeric HOST:PORT", server);
    address.sin_port = htons(port);
    int peer = socket(AF_INET, SOCK_STREAM, 0), at_once = 1;
    if (peer < 0 || connect(peer, (const struct sockaddr *)&address, sizeof address))
        fail("cannot connect to %s: %s", server, strerror(errno));
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &at_once, sizeof at_once);
    return peer;
}

/* --- time ---------------------------------------------------------------------------------- */

int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

double cpu_seconds(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_utime.tv_sec + usage.ru_stime.tv_sec +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

Start start(void) { return (Start){now_ns(), cpu_seconds()}; }

void print_load(Start begun, int64_t messages) {
    double seconds = (now_ns() - begun.wall_ns) / 1e9;
    printf("{\"messages\": %" PRId64 ", \"seconds\": %.6f, \"cpu_seconds\": %.6f, "
           "\"messages_per_second\": %.1f}\n",
           messages, seconds, cpu_seconds() - begun.cpu, messages / seconds);
}
