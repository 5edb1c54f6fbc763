package quackmq;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.FileDescriptor;
import java.io.FileOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;

/**
 * Kafka's Java client, driven by lines of JSON: one JVM for all tests of a worker.
 *
 * <p>A line on stdin is a command, {@code {"id": 1, "do": "send", ...}}. Its answer on stdout is
 * {@code {"id": 1, "gives": ...}} or {@code {"id": 1, "fails": {"name": ..., "text": ...}}}.
 * Commands run at the same time, so answers come in any order. Producers, consumers and admins are
 * known by the number that the command gave which opened them. The end of stdin is the end of all.
 */
public final class Driver {
    /** What a command does; what it gives is anything that Jackson can write. */
    interface Command {
        Object run(JsonNode arguments) throws Exception;
    }

    private final ObjectMapper json = new ObjectMapper();
    private final Map<String, Command> commands = new HashMap<>();
    private final Map<Integer, AutoCloseable> opened = new ConcurrentHashMap<>();
    private final AtomicInteger numbers = new AtomicInteger();
    private final ExecutorService threads = Executors.newCachedThreadPool();
    private final OutputStream answers = new FileOutputStream(FileDescriptor.out);

    public static void main(String[] arguments) throws IOException {
        Driver driver = new Driver();
        Producing.addTo(driver);
        Consuming.addTo(driver);
        Administering.addTo(driver);
        driver.add("close", driver::close);
        driver.serve();
        // Nobody is left to close anything for.
        Runtime.getRuntime().halt(0);
    }

    void add(String name, Command command) {
        commands.put(name, command);
    }

    /** Keep what has to be closed some time; the number by which commands name it. */
    int keep(AutoCloseable client) {
        int number = numbers.incrementAndGet();
        opened.put(number, client);
        return number;
    }

    /** The client that a command names. */
    <T> T named(JsonNode arguments, String kind, Class<T> type) {
        return type.cast(opened.get(arguments.get(kind).asInt()));
    }

    private Object close(JsonNode arguments) throws Exception {
        AutoCloseable client = opened.remove(arguments.get("number").asInt());
        if (client != null) {
            client.close();
        }
        return null;
    }

    private void serve() throws IOException {
        var lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            JsonNode command = json.readTree(line);
            threads.execute(() -> answer(command));
        }
    }

    private void answer(JsonNode command) {
        ObjectNode answer = json.createObjectNode();
        answer.set("id", command.get("id"));
        try {
            Object given = commands.get(command.get("do").asText()).run(command);
            answer.set("gives", json.valueToTree(given));
        } catch (Throwable failure) {
            answer.set("fails", json.valueToTree(told(failure)));
        }
        try {
            byte[] line = (json.writeValueAsString(answer) + "\n").getBytes(StandardCharsets.UTF_8);
            synchronized (answers) {
                answers.write(line);
            }
        } catch (IOException gone) {
            Runtime.getRuntime().halt(1);
        }
    }

    static Map<String, String> told(Throwable failure) {
        Throwable cause = failure;
        while (cause instanceof ExecutionException && cause.getCause() != null) {
            cause = cause.getCause();
        }
        return Map.of("name", cause.getClass().getSimpleName(), "text", String.valueOf(cause));
    }

    // --- values in JSON -------------------------------------------------------------------------

    /** Bytes are strings whose characters are the bytes; null is null. */
    static byte[] bytes(JsonNode text) {
        if (text == null || text.isNull()) {
            return null;
        }
        return text.asText().getBytes(StandardCharsets.ISO_8859_1);
    }

    static String text(byte[] bytes) {
        return bytes == null ? null : new String(bytes, StandardCharsets.ISO_8859_1);
    }

    static List<String> strings(JsonNode array) {
        return array.valueStream().map(JsonNode::asText).toList();
    }

    /** The settings of a client, under Kafka's names. */
    static Map<String, Object> settings(JsonNode arguments) {
        Map<String, Object> settings = new HashMap<>();
        settings.put("bootstrap.servers", arguments.get("address").asText());
        for (var setting : arguments.path("settings").properties()) {
            settings.put(setting.getKey(), setting.getValue().asText());
        }
        return settings;
    }
}
