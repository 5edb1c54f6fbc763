package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.clients.consumer.CommitFailedException;
import org.apache.kafka.clients.consumer.ConsumerRebalanceListener;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.CooperativeStickyAssignor;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.RangeAssignor;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RebalanceInProgressException;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** A member of a group, or a producer, that says what happens to it: see programs.py. */
public final class Program implements ConsumerRebalanceListener {
    private static final Duration POLL = Duration.ofMillis(100);

    private final ObjectMapper json = new ObjectMapper();
    private final OutputStream lines = new FileOutputStream(FileDescriptor.out);
    private final JsonNode told;
    private final Map<String, Object> settings = new HashMap<>();
    private final Set<TopicPartition> held = new HashSet<>();
    private volatile boolean over;
    private volatile Exception failure;

    public static void main(String[] arguments) throws Exception {
        var program = new Program(new ObjectMapper().readTree(arguments[0]));
        var end = new Thread(program::waitForTheEnd);
        end.setDaemon(true);
        end.start();
        if (program.told.get("role").asText().equals("member")) {
            program.member();
        } else {
            program.producer();
        }
    }

    private Program(JsonNode told) {
        this.told = told;
        settings.put("bootstrap.servers", told.get("address").asText());
        // A broker that was killed is back soon, and a test waits for nobody's patience.
        settings.put("reconnect.backoff.max.ms", 200);
        settings.put("retry.backoff.max.ms", 200);
    }

    private void member() {
        boolean cooperative = told.get("cooperative").asBoolean();
        var assignor = cooperative ? CooperativeStickyAssignor.class : RangeAssignor.class;
        settings.putAll(Map.of(
                "group.id", told.get("group").asText(),
                "group.protocol", told.get("protocol").asText(),
                "auto.offset.reset", "earliest",
                "enable.auto.commit", false,
                "max.poll.records", 20));
        if (told.get("protocol").asText().equals("classic")) {
            settings.putAll(Map.of(
                    "session.timeout.ms", told.get("session_ms").asInt(),
                    "heartbeat.interval.ms", told.get("heartbeat_ms").asInt(),
                    "partition.assignment.strategy", assignor.getName()));
        }
        // Some records at a time, so that the machine has time for others, too.
        settings.putAll(Map.of("fetch.min.bytes", 4096, "fetch.max.wait.ms", 50));
        if (told.hasNonNull("instance")) {
            settings.put("group.instance.id", told.get("instance").asText());
        }
        var deserializer = new StringDeserializer();
        try (var consumer = new KafkaConsumer<>(settings, deserializer, deserializer)) {
            consumer.subscribe(List.of(told.get("topic").asText()), this);
            while (!over) {
                read(consumer);
            }
        }
    }

    private void read(KafkaConsumer<String, String> consumer) {
        ConsumerRecords<String, String> records;
        try {
            records = consumer.poll(POLL);
        } catch (IllegalStateException confused) {
            // The two threads of the newer protocol's consumer at times disagree, after its broker
            // was away, on a position that is being looked up again. It goes on from where it was.
            if (!String.valueOf(confused.getMessage()).contains("valid current position")) {
                throw confused;
            }
            return;
        }
        records.forEach(record -> say("record", List.of(record.partition()), Map.of(
                "offset", record.offset(), "value", record.value())));
        var next = records.nextOffsets();
        if (next.isEmpty()) {
            return;
        }
        try {
            consumer.commitSync(next);
        } catch (RebalanceInProgressException | CommitFailedException refused) {
            return;
        }
        next.forEach((partition, cursor) -> {
            say("committed", List.of(partition.partition()), Map.of("offset", cursor.offset()));
        });
    }

    @Override
    public void onPartitionsAssigned(Collection<TopicPartition> partitions) {
        held.addAll(partitions);
        say("assigned", numbers(partitions), Map.of());
    }

    /** Also called for what is lost, unless told otherwise; and, by a client of the newer protocol
     * that is closed at that moment, for what was never assigned. */
    @Override
    public void onPartitionsRevoked(Collection<TopicPartition> partitions) {
        var had = partitions.stream().filter(held::contains).toList();
        held.removeAll(had);
        say("revoked", numbers(had), Map.of());
    }

    private void producer() throws Exception {
        settings.putAll(Map.of(
                "enable.idempotence", true, "linger.ms", 1, "delivery.timeout.ms", 120_000));
        String topic = told.get("topic").asText();
        int count = 0;
        var serializer = new StringSerializer();
        try (var producer = new KafkaProducer<>(settings, serializer, serializer)) {
            for (; !over && failure == null; count++) {
                String value = String.valueOf(count);
                producer.send(new ProducerRecord<>(topic, 0, null, value), (place, error) -> {
                    if (error != null) {
                        failure = error;
                    }
                });
                // A pace that leaves the machine to others, too.
                if (count % 10 == 0) {
                    Thread.sleep(2);
                }
            }
            producer.flush();
        }
        if (failure != null) {
            throw failure;
        }
        say("sent", List.of(), Map.of("count", count));
    }

    private void waitForTheEnd() {
        try {
            while (System.in.read() >= 0) {
                continue;
            }
        } catch (IOException gone) {
            failure = gone;
        }
        over = true;
    }

    private static List<Integer> numbers(Collection<TopicPartition> partitions) {
        return partitions.stream().map(TopicPartition::partition).sorted().toList();
    }

    private synchronized void say(String kind, List<Integer> partitions, Map<String, Object> more) {
        Map<String, Object> event = new HashMap<>(more);
        long now = System.currentTimeMillis();
        event.putAll(Map.of("kind", kind, "at_ms", now, "partitions", partitions));
        try {
            lines.write((json.writeValueAsString(event) + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (IOException gone) {
            throw new UncheckedIOException(gone);
        }
    }
}
