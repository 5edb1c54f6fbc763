package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;

/** The commands of an admin that are about transactions. */
final class AdministeringTransactions {
    private final Driver driver;

    static void addTo(Driver driver) {
        var commands = new AdministeringTransactions(driver);
        driver.add("list_transactions", commands::list);
        driver.add("describe_transactions", commands::describe);
        driver.add("describe_producers", commands::producers);
        driver.add("fence_producers", commands::fence);
    }

    private AdministeringTransactions(Driver driver) {
        this.driver = driver;
    }

    private Admin admin(JsonNode arguments) {
        return driver.named(arguments, "admin", Admin.class);
    }

    private Object list(JsonNode arguments) throws Exception {
        Map<String, Object> shown = new HashMap<>();
        for (var one : admin(arguments).listTransactions().all().get()) {
            shown.put(one.transactionalId(), one.state().toString());
        }
        return shown;
    }

    private Object describe(JsonNode arguments) throws Exception {
        var told = admin(arguments).describeTransactions(Driver.strings(arguments.get("ids")));
        Map<String, Object> shown = new HashMap<>();
        told.all().get().forEach((name, one) -> shown.put(name, Map.of(
                "state", one.state().toString(),
                "producer", one.producerId(),
                "epoch", one.producerEpoch(),
                "timeout_ms", one.transactionTimeoutMs(),
                "started", one.transactionStartTimeMs().isPresent(),
                "partitions", Consuming.shown(one.topicPartitions()))));
        return shown;
    }

    /** Of one partition. */
    private Object producers(JsonNode arguments) throws Exception {
        var partition = Administering.partition(arguments.get("partition"));
        var told = admin(arguments).describeProducers(List.of(partition)).all().get();
        return told.get(partition).activeProducers().stream()
                .map(one -> Map.of(
                        "producer", one.producerId(),
                        "epoch", one.producerEpoch(),
                        "open_since", one.currentTransactionStartOffset().orElse(-1)))
                .toList();
    }

    private Object fence(JsonNode arguments) throws Exception {
        admin(arguments).fenceProducers(Driver.strings(arguments.get("ids"))).all().get();
        return null;
    }
}
