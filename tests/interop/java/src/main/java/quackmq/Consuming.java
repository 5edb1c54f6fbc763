package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.CloseOptions;
import org.apache.kafka.clients.consumer.CloseOptions.GroupMembershipOperation;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * The commands of consumers, each of which has a thread that polls and carries out what is asked of
 * it between polls: a consumer may be used by one thread only.
 */
final class Consuming implements AutoCloseable {
    private static final Duration POLL = Duration.ofMillis(20);
    private static final Duration CLOSE = Duration.ofSeconds(5);

    private final KafkaConsumer<byte[], byte[]> consumer;
    private final LinkedBlockingQueue<Runnable> tasks = new LinkedBlockingQueue<>();
    private final List<Object> records = new ArrayList<>();
    private final Thread thread = new Thread(this::run);
    private boolean reads;
    private boolean closed;
    private Throwable failure;

    static void addTo(Driver driver) {
        driver.add("consumer", arguments -> {
            var opened = new Consuming(Driver.settings(arguments));
            opened.thread.start();
            return driver.keep(opened);
        });
        driver.add("assign", arguments -> {
            Consuming reader = named(driver, arguments);
            return reader.ask(() -> reader.assign(arguments.get("partitions")));
        });
        driver.add("subscribe", arguments -> {
            Consuming reader = named(driver, arguments);
            return reader.ask(() -> reader.subscribe(Driver.strings(arguments.get("topics"))));
        });
        driver.add("take", arguments -> {
            int count = arguments.get("count").asInt();
            return named(driver, arguments).take(count, arguments.get("wait_ms").asLong());
        });
        driver.add("member", arguments -> {
            Consuming reader = named(driver, arguments);
            return reader.ask(reader::member);
        });
        driver.add("commit", arguments -> {
            Consuming reader = named(driver, arguments);
            return reader.ask(() -> reader.commit(arguments.path("offsets")));
        });
        driver.add("committed", arguments -> {
            Consuming reader = named(driver, arguments);
            return reader.ask(() -> reader.committed(arguments.get("partitions")));
        });
        driver.add("vanish", arguments -> {
            named(driver, arguments).close(GroupMembershipOperation.REMAIN_IN_GROUP);
            return null;
        });
    }

    private static Consuming named(Driver driver, JsonNode arguments) {
        return driver.named(arguments, "consumer", Consuming.class);
    }

    private Consuming(Map<String, Object> settings) {
        var deserializer = new ByteArrayDeserializer();
        consumer = new KafkaConsumer<>(settings, deserializer, deserializer);
    }

    // --- what is asked for, in the consumer's own thread ----------------------------------------

    /** Partitions, each as topic, number, and where to begin. */
    private Object assign(JsonNode partitions) {
        Map<TopicPartition, JsonNode> starts = new HashMap<>();
        for (JsonNode one : partitions) {
            starts.put(partition(one), one.get(2));
        }
        consumer.assign(starts.keySet());
        starts.forEach(this::seek);
        reads = true;
        // So that the end is the end of now.
        List<Long> positions = new ArrayList<>();
        for (JsonNode one : partitions) {
            positions.add(consumer.position(partition(one)));
        }
        return positions;
    }

    private void seek(TopicPartition partition, JsonNode start) {
        if (start.isNumber()) {
            consumer.seek(partition, start.asLong());
        } else if (start.isObject()) {
            var times = Map.of(partition, start.get("time").asLong());
            var found = consumer.offsetsForTimes(times).get(partition);
            if (found == null) {
                consumer.seekToEnd(List.of(partition));
            } else {
                consumer.seek(partition, found.offset());
            }
        } else if (start.asText().equals("start")) {
            consumer.seekToBeginning(List.of(partition));
        } else {
            consumer.seekToEnd(List.of(partition));
        }
    }

    private Object subscribe(List<String> topics) {
        consumer.subscribe(topics);
        reads = true;
        return null;
    }

    private Object member() {
        return Map.of(
                "id", consumer.groupMetadata().memberId(),
                "generation", consumer.groupMetadata().generationId(),
                "partitions", shown(consumer.assignment()));
    }

    /** What was read, or what is told. */
    private Object commit(JsonNode offsets) {
        if (offsets.isMissingNode() || offsets.isNull()) {
            consumer.commitSync();
            return null;
        }
        Map<TopicPartition, OffsetAndMetadata> told = new HashMap<>();
        for (JsonNode one : offsets) {
            var cursor = new OffsetAndMetadata(one.get(2).asLong(), one.path(3).asText(""));
            told.put(partition(one), cursor);
        }
        consumer.commitSync(told);
        return null;
    }

    private Object committed(JsonNode partitions) {
        Set<TopicPartition> wanted = new HashSet<>();
        for (JsonNode one : partitions) {
            wanted.add(partition(one));
        }
        List<Object> found = new ArrayList<>();
        consumer.committed(wanted).forEach((partition, cursor) -> {
            if (cursor != null) {
                var place = partition.partition();
                found.add(List.of(partition.topic(), place, cursor.offset(), cursor.metadata()));
            }
        });
        return found;
    }

    private static TopicPartition partition(JsonNode one) {
        return new TopicPartition(one.get(0).asText(), one.get(1).asInt());
    }

    // --- the thread -----------------------------------------------------------------------------

    private void run() {
        while (!closed) {
            try {
                Runnable task = reads ? tasks.poll() : tasks.take();
                if (task != null) {
                    task.run();
                } else {
                    poll();
                }
            } catch (Throwable error) {
                fail(error);
            }
        }
    }

    private void poll() {
        var polled = consumer.poll(POLL);
        synchronized (records) {
            polled.forEach(record -> records.add(shown(record)));
            records.notifyAll();
        }
    }

    private void fail(Throwable error) {
        synchronized (records) {
            failure = error;
            reads = false;
            records.notifyAll();
        }
    }

    private <T> T ask(Callable<T> task) throws Exception {
        CompletableFuture<T> outcome = new CompletableFuture<>();
        tasks.add(() -> {
            try {
                outcome.complete(task.call());
            } catch (Throwable error) {
                outcome.completeExceptionally(error);
            }
        });
        return outcome.get();
    }

    @Override
    public void close() throws Exception {
        close(GroupMembershipOperation.DEFAULT);
    }

    private void close(GroupMembershipOperation operation) throws Exception {
        if (!thread.isAlive()) {
            return;
        }
        ask(() -> {
            closed = true;
            consumer.close(CloseOptions.timeout(CLOSE).withGroupMembershipOperation(operation));
            return null;
        });
        thread.join();
    }

    // --- what came ------------------------------------------------------------------------------

    /** So many records, or as many as came in time. */
    private List<Object> take(int count, long waitMs) throws Exception {
        long deadline = System.nanoTime() + TimeUnit.MILLISECONDS.toNanos(waitMs);
        synchronized (records) {
            while (records.size() < count && failure == null) {
                long left = TimeUnit.NANOSECONDS.toMillis(deadline - System.nanoTime());
                if (left <= 0) {
                    break;
                }
                records.wait(left);
            }
            if (failure != null) {
                throw new ExecutionException(failure);
            }
            var front = records.subList(0, Math.min(count, records.size()));
            List<Object> taken = new ArrayList<>(front);
            front.clear();
            return taken;
        }
    }

    private static Object shown(ConsumerRecord<byte[], byte[]> record) {
        List<Object> headers = new ArrayList<>();
        record.headers().forEach(header -> {
            List<String> pair = new ArrayList<>();
            pair.add(header.key());
            pair.add(Driver.text(header.value()));
            headers.add(pair);
        });
        Map<String, Object> shown = new HashMap<>();
        shown.put("topic", record.topic());
        shown.put("partition", record.partition());
        shown.put("offset", record.offset());
        shown.put("timestamp", record.timestamp());
        shown.put("key", Driver.text(record.key()));
        shown.put("value", Driver.text(record.value()));
        shown.put("headers", headers);
        return shown;
    }

    static List<Object> shown(Collection<TopicPartition> partitions) {
        List<Object> shown = new ArrayList<>();
        partitions.stream()
                .sorted((one, other) -> one.toString().compareTo(other.toString()))
                .forEach(one -> shown.add(List.of(one.topic(), one.partition())));
        return shown;
    }
}
