package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;

/** The commands of an admin that are about the cluster, topics and records. */
final class Administering {
    private final Driver driver;

    static void addTo(Driver driver) {
        var commands = new Administering(driver);
        driver.add("admin", arguments -> driver.keep(Admin.create(Driver.settings(arguments))));
        driver.add("describe_cluster", commands::describeCluster);
        driver.add("create_topics", commands::createTopics);
        driver.add("delete_topics", commands::deleteTopics);
        driver.add("list_topics", commands::listTopics);
        driver.add("describe_topics", commands::describeTopics);
        driver.add("create_partitions", commands::createPartitions);
        driver.add("describe_configs", commands::describeConfigs);
        driver.add("alter_configs", commands::alterConfigs);
        driver.add("delete_records", commands::deleteRecords);
        driver.add("list_offsets", commands::listOffsets);
        driver.add("describe_log_dirs", commands::describeLogDirs);
        AdministeringGroups.addTo(driver);
        AdministeringTransactions.addTo(driver);
    }

    private Administering(Driver driver) {
        this.driver = driver;
    }

    private Admin admin(JsonNode arguments) {
        return driver.named(arguments, "admin", Admin.class);
    }

    private Object describeCluster(JsonNode arguments) throws Exception {
        var told = admin(arguments).describeCluster();
        return Map.of(
                "id", told.clusterId().get(),
                "controller", shown(told.controller().get()),
                "nodes", told.nodes().get().stream().map(Administering::shown).toList());
    }

    /** What was made, with its number of partitions and its configs as the broker tells them. */
    private Object createTopics(JsonNode arguments) throws Exception {
        List<NewTopic> topics = new ArrayList<>();
        for (JsonNode wanted : arguments.get("topics")) {
            Map<String, String> configs = new HashMap<>();
            wanted.path("configs").properties()
                    .forEach(config -> configs.put(config.getKey(), config.getValue().asText()));
            short replicas = (short) wanted.path("replicas").asInt(1);
            int partitions = wanted.path("partitions").asInt(1);
            var topic = new NewTopic(wanted.get("name").asText(), partitions, replicas);
            topics.add(topic.configs(configs));
        }
        boolean validateOnly = arguments.path("validate_only").asBoolean();
        var options = new CreateTopicsOptions().validateOnly(validateOnly);
        var created = admin(arguments).createTopics(topics, options);
        created.all().get();
        Map<String, Object> shown = new HashMap<>();
        for (NewTopic topic : topics) {
            Map<String, String> configs = new HashMap<>();
            created.config(topic.name()).get().entries()
                    .forEach(entry -> configs.put(entry.name(), entry.value()));
            int partitions = created.numPartitions(topic.name()).get();
            shown.put(topic.name(), Map.of("partitions", partitions, "configs", configs));
        }
        return shown;
    }

    private Object deleteTopics(JsonNode arguments) throws Exception {
        admin(arguments).deleteTopics(Driver.strings(arguments.get("topics"))).all().get();
        return null;
    }

    private Object listTopics(JsonNode arguments) throws Exception {
        return admin(arguments).listTopics().names().get();
    }

    private Object describeTopics(JsonNode arguments) throws Exception {
        var told = admin(arguments).describeTopics(Driver.strings(arguments.get("topics")));
        Map<String, Object> shown = new HashMap<>();
        told.allTopicNames().get().forEach((name, topic) -> shown.put(name, Map.of(
                "id", topic.topicId().toString(),
                "internal", topic.isInternal(),
                "partitions", topic.partitions().stream().map(partition -> Map.of(
                        "number", partition.partition(),
                        "leader", partition.leader().id(),
                        "replicas", partition.replicas().stream().map(Node::id).toList(),
                        "in_sync", partition.isr().stream().map(Node::id).toList())).toList())));
        return shown;
    }

    private Object createPartitions(JsonNode arguments) throws Exception {
        String topic = arguments.get("topic").asText();
        var total = NewPartitions.increaseTo(arguments.get("total").asInt());
        admin(arguments).createPartitions(Map.of(topic, total)).all().get();
        return null;
    }

    private Object describeConfigs(JsonNode arguments) throws Exception {
        ConfigResource resource = resource(arguments);
        var told = admin(arguments).describeConfigs(List.of(resource)).all().get().get(resource);
        Map<String, Object> shown = new HashMap<>();
        for (ConfigEntry entry : told.entries()) {
            Map<String, Object> one = new HashMap<>();
            one.put("value", entry.value());
            one.put("source", entry.source().toString());
            one.put("type", entry.type().toString());
            one.put("read_only", entry.isReadOnly());
            shown.put(entry.name(), one);
        }
        return shown;
    }

    /** Changes are a name, what to do with it, and a value. */
    private Object alterConfigs(JsonNode arguments) throws Exception {
        Collection<AlterConfigOp> changes = new ArrayList<>();
        for (JsonNode change : arguments.get("changes")) {
            var operation = AlterConfigOp.OpType.valueOf(change.get(1).asText());
            String value = change.path(2).isTextual() ? change.get(2).asText() : null;
            var entry = new ConfigEntry(change.get(0).asText(), value);
            changes.add(new AlterConfigOp(entry, operation));
        }
        admin(arguments).incrementalAlterConfigs(Map.of(resource(arguments), changes)).all().get();
        return null;
    }

    private static ConfigResource resource(JsonNode arguments) {
        var kind = ConfigResource.Type.valueOf(arguments.get("kind").asText());
        return new ConfigResource(kind, arguments.get("name").asText());
    }

    /** The offset that each partition begins with from now on. */
    private Object deleteRecords(JsonNode arguments) throws Exception {
        Map<TopicPartition, RecordsToDelete> wanted = new HashMap<>();
        for (JsonNode one : arguments.get("partitions")) {
            wanted.put(partition(one), RecordsToDelete.beforeOffset(one.get(2).asLong()));
        }
        var deleted = admin(arguments).deleteRecords(wanted);
        deleted.all().get();
        List<Long> marks = new ArrayList<>();
        for (JsonNode one : arguments.get("partitions")) {
            marks.add(deleted.lowWatermarks().get(partition(one)).get().lowWatermark());
        }
        return marks;
    }

    /** Partitions are a topic, a number, and what is looked for. */
    private Object listOffsets(JsonNode arguments) throws Exception {
        Map<TopicPartition, OffsetSpec> wanted = new HashMap<>();
        for (JsonNode one : arguments.get("partitions")) {
            wanted.put(partition(one), spec(one.get(2)));
        }
        var told = admin(arguments).listOffsets(wanted).all().get();
        List<Object> shown = new ArrayList<>();
        for (JsonNode one : arguments.get("partitions")) {
            var found = told.get(partition(one));
            shown.add(List.of(found.offset(), found.timestamp()));
        }
        return shown;
    }

    private static OffsetSpec spec(JsonNode wanted) {
        if (wanted.isNumber()) {
            return OffsetSpec.forTimestamp(wanted.asLong());
        }
        return switch (wanted.asText()) {
            case "start" -> OffsetSpec.earliest();
            case "end" -> OffsetSpec.latest();
            case "max_timestamp" -> OffsetSpec.maxTimestamp();
            default -> throw new IllegalArgumentException(wanted.asText());
        };
    }

    private Object describeLogDirs(JsonNode arguments) throws Exception {
        int node = arguments.get("node").asInt();
        Map<String, Object> shown = new HashMap<>();
        admin(arguments).describeLogDirs(List.of(node)).allDescriptions().get().get(node)
                .forEach((directory, described) -> {
                    Map<String, Long> sizes = new HashMap<>();
                    described.replicaInfos().forEach((partition, info) ->
                            sizes.put(partition.toString(), info.size()));
                    shown.put(directory, sizes);
                });
        return shown;
    }

    static TopicPartition partition(JsonNode one) {
        return new TopicPartition(one.get(0).asText(), one.get(1).asInt());
    }

    private static Object shown(Node node) {
        return Map.of("id", node.id(), "address", node.host() + ":" + node.port());
    }
}
