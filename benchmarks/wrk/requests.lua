-- wrk METHOD [BODY PATH …]: the requests in turn, each as it stands; an empty BODY sends none.
-- Prints what came of it as one JSON object. See wrk/__init__.py.

local requests = {}
local sent = 0

function init(words)
    local method, body = words[1], words[2]
    local headers = {["Content-Type"] = "application/json"}
    if body == "" then body, headers = nil, {} end
    for at = 3, #words do
        requests[#requests + 1] = wrk.format(method, words[at], headers, body)
    end
end

function request()
    sent = sent + 1
    return requests[(sent - 1) % #requests + 1]
end

function done(summary, latency)
    local errors = summary.errors
    io.write(string.format(
        '{"requests": %d, "seconds": %.6f, "p50_us": %d, "not_answered": %d, "refused": %d}\n',
        summary.requests, summary.duration / 1e6, latency:percentile(50),
        errors.connect + errors.read + errors.write + errors.timeout, errors.status))
end
