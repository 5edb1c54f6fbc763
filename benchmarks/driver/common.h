/* What every program here needs: to give up in words, memory, a connection, the time. */

#ifndef COMMON_H
#define COMMON_H

#include <stddef.h>
#include <stdint.h>

typedef struct {
    int64_t wall_ns;
    double cpu;
} Start;

Start start(void);
double cpu_seconds(void);
void print_load(Start begun, int64_t messages);

_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
int64_t number(const char *text);
void *allocated(size_t count, size_t bytes);
int64_t now_ns(void);
char *value_of(size_t bytes);

/* The first eight bytes of a value, in which some loads send the time; 0 where it is shorter. */
int64_t stamp_of(const void *value, size_t bytes);

/* A TCP connection to a numeric HOST:PORT. Small messages leave at once. */
int connected(const char *server);

#endif
