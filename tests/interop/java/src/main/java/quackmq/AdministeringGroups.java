package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ConsumerGroupDescription;
import org.apache.kafka.clients.admin.MemberDescription;
import org.apache.kafka.clients.admin.MemberToRemove;
import org.apache.kafka.clients.admin.RemoveMembersFromConsumerGroupOptions;
import org.apache.kafka.clients.consumer.OffsetAndMetadata;
import org.apache.kafka.common.TopicPartition;

/** The commands of an admin that are about groups. */
final class AdministeringGroups {
    private final Driver driver;

    static void addTo(Driver driver) {
        var commands = new AdministeringGroups(driver);
        driver.add("list_groups", commands::list);
        driver.add("describe_groups", commands::describe);
        driver.add("delete_groups", commands::delete);
        driver.add("group_offsets", commands::offsets);
        driver.add("alter_group_offsets", commands::alterOffsets);
        driver.add("delete_group_offsets", commands::deleteOffsets);
        driver.add("remove_members", commands::removeMembers);
    }

    private AdministeringGroups(Driver driver) {
        this.driver = driver;
    }

    private Admin admin(JsonNode arguments) {
        return driver.named(arguments, "admin", Admin.class);
    }

    private Object list(JsonNode arguments) throws Exception {
        Map<String, Object> shown = new HashMap<>();
        for (var group : admin(arguments).listGroups().all().get()) {
            shown.put(group.groupId(), Map.of(
                    "state", group.groupState().map(Object::toString).orElse(""),
                    "protocol", group.protocol()));
        }
        return shown;
    }

    private Object describe(JsonNode arguments) throws Exception {
        var told = admin(arguments).describeConsumerGroups(Driver.strings(arguments.get("groups")));
        Map<String, Object> shown = new HashMap<>();
        told.all().get().forEach((name, group) -> shown.put(name, shown(group)));
        return shown;
    }

    private static Object shown(ConsumerGroupDescription group) {
        return Map.of(
                "state", group.groupState().toString(),
                "type", group.type().toString(),
                "assignor", group.partitionAssignor(),
                "coordinator", group.coordinator().id(),
                "members", group.members().stream().map(AdministeringGroups::shown).toList());
    }

    private static Object shown(MemberDescription member) {
        return Map.of(
                "id", member.consumerId(),
                "instance", member.groupInstanceId().orElse(""),
                "client", member.clientId(),
                "host", member.host(),
                "partitions", Consuming.shown(member.assignment().topicPartitions()));
    }

    private Object delete(JsonNode arguments) throws Exception {
        admin(arguments).deleteConsumerGroups(Driver.strings(arguments.get("groups"))).all().get();
        return null;
    }

    private Object offsets(JsonNode arguments) throws Exception {
        String group = arguments.get("group").asText();
        var told = admin(arguments).listConsumerGroupOffsets(group);
        List<Object> shown = new ArrayList<>();
        told.partitionsToOffsetAndMetadata().get().forEach((partition, cursor) -> shown.add(List.of(
                partition.topic(), partition.partition(), cursor.offset(), cursor.metadata())));
        return shown;
    }

    private Object alterOffsets(JsonNode arguments) throws Exception {
        Map<TopicPartition, OffsetAndMetadata> offsets = new HashMap<>();
        for (JsonNode one : arguments.get("offsets")) {
            var cursor = new OffsetAndMetadata(one.get(2).asLong(), one.path(3).asText(""));
            offsets.put(Administering.partition(one), cursor);
        }
        String group = arguments.get("group").asText();
        admin(arguments).alterConsumerGroupOffsets(group, offsets).all().get();
        return null;
    }

    private Object deleteOffsets(JsonNode arguments) throws Exception {
        Set<TopicPartition> partitions = new HashSet<>();
        arguments.get("partitions").forEach(one -> partitions.add(Administering.partition(one)));
        String group = arguments.get("group").asText();
        admin(arguments).deleteConsumerGroupOffsets(group, partitions).all().get();
        return null;
    }

    /** Those with the names told, or all. */
    private Object removeMembers(JsonNode arguments) throws Exception {
        Set<MemberToRemove> members = new HashSet<>();
        arguments.path("instances").forEach(name -> members.add(new MemberToRemove(name.asText())));
        var options = members.isEmpty()
                ? new RemoveMembersFromConsumerGroupOptions()
                : new RemoveMembersFromConsumerGroupOptions(members);
        String group = arguments.get("group").asText();
        admin(arguments).removeMembersFromConsumerGroup(group, options).all().get();
        return null;
    }
}
