package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.IOException;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/** Source topic in, target topic out, in transactions: see programs.py. */
public final class Transformer {
    private static final Duration POLL = Duration.ofMillis(100);
    private static final Duration CLOSE = Duration.ofSeconds(5);
    private static final int CANNOT_GO_ON = 3;

    private final ObjectMapper json = new ObjectMapper();
    private final JsonNode told;
    private final boolean transactions;
    private final Random random;
    private final KafkaConsumer<String, String> consumer;
    private final KafkaProducer<String, String> producer;
    private volatile boolean over;

    public static void main(String[] arguments) throws Exception {
        var transformer = new Transformer(new ObjectMapper().readTree(arguments[0]));
        var end = new Thread(transformer::waitForTheEnd);
        end.setDaemon(true);
        end.start();
        try {
            transformer.run();
        } catch (KafkaException failure) {
            cannotGoOn(failure);
        }
    }

    private Transformer(JsonNode told) {
        this.told = told;
        transactions = told.get("transactions").asBoolean();
        random = new Random(told.get("seed").asLong());
        Map<String, Object> common = Map.of(
                "bootstrap.servers", told.get("address").asText(),
                "reconnect.backoff.max.ms", 200,
                "retry.backoff.max.ms", 200);
        Map<String, Object> reading = new HashMap<>(common);
        reading.putAll(Map.of(
                "group.id", told.get("group").asText(),
                "group.protocol", "classic",
                "session.timeout.ms", told.get("session_ms").asInt(),
                "heartbeat.interval.ms", told.get("heartbeat_ms").asInt(),
                "isolation.level", "read_committed",
                "auto.offset.reset", "earliest",
                "enable.auto.commit", false,
                "max.poll.records", 50,
                "fetch.max.wait.ms", 50));
        var deserializer = new StringDeserializer();
        consumer = new KafkaConsumer<>(reading, deserializer, deserializer);
        Map<String, Object> writing = new HashMap<>(common);
        writing.put("linger.ms", 1);
        if (transactions) {
            writing.put("transactional.id", told.get("transactional_id").asText());
            writing.put("transaction.timeout.ms", 10_000);
        }
        var serializer = new StringSerializer();
        producer = new KafkaProducer<>(writing, serializer, serializer);
    }

    private void run() throws Exception {
        if (transactions) {
            producer.initTransactions();
        }
        consumer.subscribe(List.of(told.get("source").asText()));
        while (!over) {
            ConsumerRecords<String, String> records = consumer.poll(POLL);
            if (records.isEmpty()) {
                continue;
            }
            try {
                transform(records);
                say("committed", Map.of("count", records.count()));
            } catch (KafkaException failure) {
                beginAgain(failure);
            }
        }
        consumer.close();
        producer.close(CLOSE);
    }

    private void transform(ConsumerRecords<String, String> records) throws Exception {
        if (transactions) {
            producer.beginTransaction();
        }
        String target = told.get("target").asText();
        records.forEach(record -> producer.send(new ProducerRecord<>(
                target, record.partition() % 2, null, "image of " + record.value())));
        dawdle();
        if (transactions) {
            producer.sendOffsetsToTransaction(records.nextOffsets(), consumer.groupMetadata());
            dawdle();
            say("produced", Map.of());
            producer.commitTransaction();
        } else {
            producer.flush();
            say("produced", Map.of());
            dawdle();
            consumer.commitSync(records.nextOffsets());
        }
    }

    /** From what is committed. */
    private void beginAgain(KafkaException failure) throws IOException {
        say("aborted", Map.of("value", String.valueOf(failure)));
        if (transactions) {
            producer.abortTransaction();
        }
        var held = consumer.assignment();
        Map<TopicPartition, OffsetAndMetadata> committed = consumer.committed(held);
        for (TopicPartition partition : held) {
            OffsetAndMetadata cursor = committed.get(partition);
            consumer.seek(partition, cursor == null ? 0 : cursor.offset());
        }
    }

    /** So that kills meet it everywhere. */
    private void dawdle() throws InterruptedException {
        Thread.sleep((long) (random.nextDouble() * told.get("dawdle_ms").asInt()));
    }

    private static void cannotGoOn(KafkaException failure) {
        System.err.println("cannot go on: " + failure);
        Runtime.getRuntime().halt(CANNOT_GO_ON);
    }

    private void waitForTheEnd() {
        try {
            while (System.in.read() >= 0) {
                continue;
            }
        } catch (IOException gone) {
            // Nobody is there any more, which is the end as well.
        }
        over = true;
    }

    private void say(String kind, Map<String, Object> more) throws IOException {
        Map<String, Object> event = new HashMap<>(more);
        event.put("kind", kind);
        event.put("at_ms", System.currentTimeMillis());
        System.out.println(json.writeValueAsString(event));
        System.out.flush();
    }
}
