/* What a load (loads.c) needs of a client library, and what the clients need in common.
 *
 * One of kafka.c, nats.c, redis.c and rabbitmq.c is linked with loads.c into one program. Each offers
 * a sender and a reader of one topic, in the way that is fastest with that system's own protocol.
 * Anything that goes wrong ends the program with a line on stderr: a figure with an error in it is no
 * figure.
 *
 * A sender is used by one thread, and so is a reader; many of them may live side by side, each with a
 * connection of its own.
 */

#ifndef CLIENT_H
#define CLIENT_H

#include "common.h"

#include <stdbool.h>

/* POLL_MS: how long a client waits for something before it looks up. PATIENCE_S: how long nothing may
 * happen before a load gives up. IN_FLIGHT: what may be sent and not acknowledged, where the library
 * has no default of its own. READ_AT_ONCE: about as many as one call of reader_read takes. */
enum { POLL_MS = 100, PATIENCE_S = 60, IN_FLIGHT = 10000, READ_AT_ONCE = 1000, TOPIC_BYTES = 256 };

typedef struct Sender Sender;
typedef struct Reader Reader;

/* Ready to send to the topic, which exists afterwards. Batched: as many at once as the client likes;
 * otherwise each message leaves by itself and at once. */
Sender *sender_new(const char *server, const char *topic, bool batched);

/* Send, or keep for sending soon. Waits while too much is under way. */
void sender_send(Sender *sender, const char *value, size_t bytes);

/* How many have been acknowledged so far. With wait, everything goes out now, and the call waits up to
 * about POLL_MS for acknowledgements; without, it takes what is there already. */
int64_t sender_acknowledged(Sender *sender, bool wait);

/* Reads the topic, which exists, from its first message on. */
Reader *reader_new(const char *server, const char *topic);

/* Read some, waiting up to about POLL_MS for the first. Answers how many, and of the last one of them
 * the stamp (stamp_of). */
int64_t reader_read(Reader *reader, int64_t *stamp);

/* The library and its version, for people. */
const char *client_name(void);

/* Commands that only this client has; a name of NULL ends them. */
typedef struct {
    const char *name;
    int operands;
    void (*run)(char **operands);
} Command;

extern const Command client_commands[];

/* --- in loads.c ---------------------------------------------------------------------------- */

/* NAME=VALUE settings of the library, after the operands; NULL ends them. */
extern char **options;

#endif
