package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import java.util.function.Consumer;
import org.apache.kafka.clients.consumer.ConsumerGroupMetadata;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.internals.RecordHeader;
import org.apache.kafka.common.header.internals.RecordHeaders;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/** The commands of producers. */
final class Producing implements AutoCloseable {
    private final KafkaProducer<byte[], byte[]> producer;

    static void addTo(Driver driver) {
        driver.add("producer", arguments -> driver.keep(new Producing(Driver.settings(arguments))));
        driver.add("send", arguments -> named(driver, arguments).send(arguments));
        addStep(driver, "init_transactions", KafkaProducer::initTransactions);
        addStep(driver, "begin", KafkaProducer::beginTransaction);
        driver.add("send_offset", arguments -> named(driver, arguments).sendOffset(arguments));
        addStep(driver, "commit_transaction", KafkaProducer::commitTransaction);
        addStep(driver, "abort", KafkaProducer::abortTransaction);
    }

    /** A step of a transaction. */
    private static void addStep(
            Driver driver, String name, Consumer<KafkaProducer<byte[], byte[]>> step) {
        driver.add(name, arguments -> {
            step.accept(named(driver, arguments).producer);
            return null;
        });
    }

    private static Producing named(Driver driver, JsonNode arguments) {
        return driver.named(arguments, "producer", Producing.class);
    }

    private Producing(Map<String, Object> settings) {
        var serializer = new ByteArraySerializer();
        producer = new KafkaProducer<>(settings, serializer, serializer);
    }

    /** Where each record went to, or why it did not. */
    private Object send(JsonNode arguments) throws InterruptedException {
        String topic = arguments.get("topic").asText();
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (JsonNode record : arguments.get("records")) {
            sent.add(producer.send(record(topic, record)));
        }
        producer.flush();
        List<Object> places = new ArrayList<>();
        for (Future<RecordMetadata> one : sent) {
            try {
                RecordMetadata place = one.get();
                places.add(Map.of("partition", place.partition(), "offset", place.offset()));
            } catch (ExecutionException failure) {
                places.add(Driver.told(failure));
            }
        }
        return places;
    }

    /** That a group has come to an offset in partition 0, as part of the transaction. */
    private Object sendOffset(JsonNode arguments) {
        var partition = new TopicPartition(arguments.get("topic").asText(), 0);
        var offset = new OffsetAndMetadata(arguments.get("offset").asLong());
        var group = new ConsumerGroupMetadata(arguments.get("group").asText());
        producer.sendOffsetsToTransaction(Map.of(partition, offset), group);
        return null;
    }

    private static ProducerRecord<byte[], byte[]> record(String topic, JsonNode record) {
        RecordHeaders headers = new RecordHeaders();
        for (JsonNode header : record.path("headers")) {
            headers.add(new RecordHeader(header.get(0).asText(), Driver.bytes(header.get(1))));
        }
        Integer partition = record.hasNonNull("partition") ? record.get("partition").asInt() : null;
        Long timestamp = record.hasNonNull("timestamp") ? record.get("timestamp").asLong() : null;
        byte[] key = Driver.bytes(record.get("key"));
        return new ProducerRecord<>(
                topic, partition, timestamp, key, Driver.bytes(record.get("value")), headers);
    }

    @Override
    public void close() {
        producer.close(Duration.ZERO);
    }
}
