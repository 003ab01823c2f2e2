#!/bin/sh
# Submit a job with curl, follow it, and show the winners. Needs curl and python3, and a running service (`make serve`).
#   examples/submit.sh [FILE]
#   CUKILN_URL      the service, default http://127.0.0.1:8765
#   CUKILN_API_KEY  its key, where it has one
set -eu

url=${CUKILN_URL:-http://127.0.0.1:8765}
file=${1:-$(dirname "$0")/quickstart.json}

call() {
    if [ -n "${CUKILN_API_KEY:-}" ]; then
        # From standard input, so that the key stands in no process list.
        printf 'header = "Authorization: Bearer %s"\n' "$CUKILN_API_KEY" | curl --config - "$@"
    else
        curl "$@"
    fi
}

field() {
    python3 -c 'import json, sys; print(json.load(sys.stdin)[sys.argv[1]])' "$1"
}

# 202 and the queued job, or 200 and the finished one when every problem is in the cache.
job=$(call --silent --show-error --fail-with-body --header 'Content-Type: application/json' \
    --data-binary "@$file" "$url/v1/jobs") || { echo "$job" >&2; exit 1; }
id=$(printf '%s' "$job" | field job)
echo "job $id: $(printf '%s' "$job" | field state)"

# Server-sent events until the job has ended; the service then closes the stream.
if [ "$(printf '%s' "$job" | field cached)" != True ]; then
    call --silent --show-error --no-buffer "$url/v1/jobs/$id/events"
fi

call --silent --show-error "$url/v1/jobs/$id" | python3 -c '
import json, sys
for problem in json.load(sys.stdin)["problems"]:
    winner = problem["winner"]
    print(problem["name"], winner["schedule"] if winner else problem["error"])'
