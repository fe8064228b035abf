#!/usr/bin/env bash
# Submit a script to a job service, show its output, exit with its verdict. Needs bash 4.4, curl, jq, GNU tools.
#   submit_and_wait_rayjob.sh [options] -- SCRIPT [ARG ...]
# A relative SCRIPT is sent with the files around it (tracked by git or not ignored); an absolute one is a path the
# service knows. Options: --name S, --nodes N, --devices N, --image I, --env K=V, --lease S, --reconnect-timeout S,
# --after-seq N, --job JOB (watch this one, submit nothing), --compat (exit 0 or 1 only).
# Environment: CORRAL_URL or SUBMITTER_URL, CORRAL_TOKEN or CORRAL_TOKEN_FILE, and GITHUB_* in GitHub Actions.
# Exit codes: 0 succeeded, the job's own for a failure of its code, 124 deadline, 130/143 cancelled, 75 infrastructure
# or no verdict, 69 no answer, 77 not authorised, 78 refused.
set -euo pipefail
umask 077

URL="${CORRAL_URL:-${SUBMITTER_URL:-http://127.0.0.1:8470}}"
URL="${URL%/}"
CI="${GITHUB_ACTIONS:-false}"
name="" nodes="1" devices="" image="" lease="" job="" compat="no" patience="600"
declare -i cursor=0
environment=()

say() { printf -- '-- %s\n' "$1" >&2; }

finish() {
    [[ "${compat}" == no || "$1" == 0 ]] || exit 1
    exit "$1"
}

fail() {
    printf 'error: %s\n' "$2" >&2
    finish "$1"
}

while [[ "$#" -gt 0 ]]; do
    case "$1" in
        --compat) compat="yes" ;;
        --) shift && break ;;
        --name | --nodes | --devices | --image | --env | --lease | --reconnect-timeout | --after-seq | --job)
            [[ "$#" -gt 1 ]] || fail 78 "$1 needs a value"
            case "$1" in
                --name) name="$2" ;;
                --nodes) nodes="$2" ;;
                --devices) devices="$2" ;;
                --image) image="$2" ;;
                --env) environment+=("$2") ;;
                --lease) lease="$2" ;;
                --reconnect-timeout) patience="$2" ;;
                --after-seq) cursor="$2" ;;
                --job) job="$2" ;;
            esac
            shift
            ;;
        -*) fail 78 "unknown option $1; see the head of $0" ;;
        *) break ;;
    esac
    shift
done
for number in "${nodes}" "${devices:-1}" "${lease:-1}" "${patience}"; do
    [[ "${number}" =~ ^[1-9][0-9]{0,8}$ ]] || fail 78 "${number@Q} is not a whole number of at least 1"
done
[[ -n "${job}" || "$#" -gt 0 ]] || fail 78 "nothing to run; name a script after --"
for tool in curl jq; do
    command -v "${tool}" >/dev/null || fail 78 "${tool} is not installed"
done

WORK="$(mktemp -d)"
pids=()
# shellcheck disable=SC2317,SC2329  # called by the trap
clean_up() {
    [[ "${#pids[@]}" -eq 0 ]] || kill "${pids[@]}" 2>/dev/null || true
    rm -rf "${WORK}"
}
trap clean_up EXIT

# The token goes into a file: arguments of a process can be read by every user of the machine.
token="${CORRAL_TOKEN:-}"
if [[ -z "${token}" && -n "${CORRAL_TOKEN_FILE:-}" ]]; then
    read -r token <"${CORRAL_TOKEN_FILE}" || [[ -n "${token}" ]] || fail 78 "no token in CORRAL_TOKEN_FILE"
fi
if [[ -n "${token}" && ! "${URL}" =~ ^(https://|http://(127\.[0-9.]+|localhost|\[::1\])(:|/|$)) ]]; then
    fail 78 "refusing to send the token in clear text to ${URL}; use https"
fi
printf 'Accept-Encoding: identity\n' >"${WORK}/headers"
[[ -z "${token}" ]] || printf 'Authorization: Bearer %s\n' "${token}" >>"${WORK}/headers"
unset token CORRAL_TOKEN

# call METHOD PATH [curl option ...]: the answer in ${WORK}/answer, its status in ${status}; 000: none.
call() {
    status=000
    : >"${WORK}/answer"
    curl --silent --request "$1" --header "@${WORK}/headers" --connect-timeout 10 --output "${WORK}/answer" \
        --write-out '%{http_code}\n' "${@:3}" "${URL}$2" >"${WORK}/status" || true
    read -r status <"${WORK}/status" || true
}

# Exits unless the last call succeeded.
checked() {
    local text="no reason given"
    jq -r '.error? // "no reason given" | tostring | gsub("[[:cntrl:]]"; " ") | .[:500]' "${WORK}/answer" \
        >"${WORK}/text" 2>/dev/null || true
    read -r text <"${WORK}/text" || true
    case "${status}" in
        2??) ;;
        000) fail 69 "no answer from the service at ${URL}; is it running there?" ;;
        408 | 429 | 5??) fail 75 "the service cannot now (${status}): ${text}" ;;
        401 | 403) fail 77 "the service refuses (${status}): ${text}" ;;
        *) fail 78 "the service refuses (${status}): ${text}" ;;
    esac
}

retry=(--retry 8 --retry-connrefused --retry-all-errors --retry-max-time 60)

# send_source: the files as one archive under its digest, in ${digest}.
send_source() {
    [[ -f "$1" ]] || fail 78 "script $1 does not exist in ${PWD}"
    git ls-files -co --exclude-standard -z >"${WORK}/listed" 2>/dev/null ||
        find . -name '.?*' -prune -o -type f -printf '%P\0' >"${WORK}/listed"
    while IFS= read -r -d '' file; do
        [[ ! -f "${file}" ]] || printf '%s\0' "${file}"
    done <"${WORK}/listed" >"${WORK}/files"
    tar --null --verbatim-files-from --files-from "${WORK}/files" --sort=name --mtime=@0 --owner=0 --group=0 \
        --numeric-owner --mode='u+rw,go=rX' --format=posix --pax-option='delete=atime,delete=ctime' -cf - |
        gzip -n >"${WORK}/source.tar.gz"
    sha256sum "${WORK}/source.tar.gz" >"${WORK}/digest"
    read -r digest _ <"${WORK}/digest"
    call HEAD "/api/v1/bundles/${digest}" --head "${retry[@]}"
    if [[ "${status}" != 200 ]]; then
        call PUT "/api/v1/bundles/${digest}" "${retry[@]}" --upload-file "${WORK}/source.tar.gz"
        checked
    fi
}

# The same key for every try, so that an answer that is lost is not a second job.
submit() {
    local script="$1" digest="" key=""
    shift
    [[ "${script}" == /* ]] || send_source "${script}"
    if [[ -z "${name}" ]]; then
        name="${script##*/}"
        name="${name%.*}"
    fi
    if [[ "${CI}" == true ]]; then
        key="sh-${GITHUB_REPOSITORY:-}-${GITHUB_RUN_ID:-}-${GITHUB_RUN_ATTEMPT:-}-${GITHUB_JOB:-}-${name}"
        lease="${lease:-600}"
    else
        read -r key </proc/sys/kernel/random/uuid
    fi
    printf '%s' "${key}" | sha256sum >"${WORK}/key"
    read -r key _ <"${WORK}/key"
    printf '%s\0' "${environment[@]}" >"${WORK}/environment"
    jq -n --rawfile environment "${WORK}/environment" --arg script "${script}" --arg digest "${digest}" \
        --arg name "${name}" --arg nodes "${nodes}" --arg devices "${devices}" --arg image "${image}" \
        --arg lease "${lease}" --arg repository "${GITHUB_REPOSITORY:-}" --arg sha "${GITHUB_SHA:-}" \
        --arg branch "${GITHUB_HEAD_REF:-${GITHUB_REF_NAME:-}}" --arg run "${GITHUB_RUN_ID:-}" \
        --arg attempt "${GITHUB_RUN_ATTEMPT:-}" '
        def given(f): with_entries(select(.value != "")) | f;
        {repository: $repository, commit_sha: $sha, branch: $branch, github_run_id: $run, image: $image,
         name_suffix: $name, script: $script, bundle: $digest} | given(.)
        + {args: $ARGS.positional, worker_replicas: ($nodes | tonumber)}
        + (if $attempt == "" then {} else {github_run_attempt: ($attempt | tonumber)} end)
        + (if $lease == "" then {} else {lease: ($lease | tonumber)} end)
        + (if $devices == "" then {} else
            {resources: {nodes: ($nodes | tonumber), accelerators_per_node: ($devices | tonumber)}} end)
        + {env: ($environment | split("\u0000") | map(select(. != "") | capture("^(?<key>[^=]*)=(?<value>(?s:.*))$"))
            | from_entries)}' --args -- "$@" >"${WORK}/request"
    call POST /api/v1/rayjobs "${retry[@]}" --header 'Content-Type: application/json' \
        --header "Idempotency-Key: ${key}" --data-binary "@${WORK}/request"
    checked
    jq -er '.job_id | select(test("^rj-[0-9a-f]{12}$"))' "${WORK}/answer" >"${WORK}/job" ||
        fail 75 "the answer of the service names no job"
    read -r job <"${WORK}/job"
}

# From bytes to records `seq US kind US text`: only whole lines that are events; a keep-alive is a record without seq.
# What a terminal obeys is taken out here, once.
# shellcheck disable=SC2016  # these are variables of jq
RECORDS='
def us: "\u001f";
def clean: tostring | gsub("[\u0000-\u0008\u000a-\u001f\u007f-\u009f]"; "\ufffd");
def code:
    if .status == "SUCCEEDED" then 0
    elif .status == "TIMEOUT" then 124
    elif .status == "CANCELLED" then 130
    elif .status == "NOT_FOUND" or .class == "infra" then 75
    elif .class == "config" then 78
    elif .status != "FAILED" then 75
    else (.exit_code // 1) | if (1 <= . and . <= 63) or (128 < . and . <= 192) then . else 1 end end;
def verdict: (.message // "") as $message |
    if .status == "SUCCEEDED" and $message == "" then .status
    elif .status as $status | $message | startswith($status) then $message
    else "\(.status) (\(if .class == "timeout" or .class == "cancel" then .cause else .class // .cause end)): "
    + (if .failing_rank then "rank \(.failing_rank) on node-\(.failing_node // "?"): " else "" end)
    + (.first_error // $message) + (if .exit_code then "; exit code \(.exit_code)" else "" end) end;
if test("^\\s*$") then us + "alive" + us
else (fromjson? // {}) | select((.seq? | type) == "number" and (.type? | type) == "string") | "\(.seq)" + us +
    if .type == "log" then
        "log" + us + (if .rank == null then "" else "[node-\(.node // "?") rank-\(.rank)] " end + .line | clean)
    elif .type == "final" then "final" + us + "\(code) \(verdict | clean)"
    else "note" + us + ([.status, .phase, .message | select(. != null)] | join(" ") | clean) end
end'

# Cancel first, say so afterwards: CI gives a few seconds between its signal and its kill.
declare -i signalled=0 deadline=0
# shellcheck disable=SC2317,SC2329  # called by the traps
interrupted() {
    ((signalled == 0)) || exit "$1"
    signalled="$1"
    deadline=SECONDS+10
    call POST "/api/v1/rayjobs/${job}/cancel" --max-time 5
    say "cancel sent (${status}); waiting up to 10 s for job ${job} to end"
}

# One connection, from the cursor. Sets ${code} when the final event has come; nothing else ends the job.
follow() {
    local seq="" kind="" text="" query="format=ndjson&types=all&after_seq=${cursor}"
    rm -f "${WORK}/bytes" "${WORK}/records"
    mkfifo "${WORK}/bytes" "${WORK}/records"
    curl --silent --no-buffer --header "@${WORK}/headers" --connect-timeout 10 --fail \
        --write-out '%{stderr}%{http_code}\n' "${URL}/api/v1/rayjobs/${job}/watch?${query}" \
        >"${WORK}/bytes" 2>"${WORK}/status" &
    pids=("$!")
    jq --unbuffered -R -r "${RECORDS}" <"${WORK}/bytes" >"${WORK}/records" 2>/dev/null &
    pids+=("$!")
    exec 3<"${WORK}/records"
    while [[ -z "${code}" ]] && ((deadline == 0 || SECONDS < deadline)); do
        beat
        if ! IFS=$'\x1f' read -r -t 1 -u 3 seq kind text; then
            kill -0 "${pids[1]}" 2>/dev/null && ((SECONDS - heard < 45)) && continue
            break
        fi
        heard=SECONDS
        [[ "${kind}" != alive ]] || continue
        ((seq > cursor)) || continue
        ((seq == cursor + 1)) || break
        cursor=seq
        case "${kind}" in
            log) printf '%s\n' "${text}" ;;
            note) say "${text}" ;;
            final)
                code="${text%% *}" verdict="${text#* }"
                word="${verdict%%[ :]*}"
                ;;
        esac
    done
    exec 3<&-
    kill "${pids[@]}" 2>/dev/null || true
    wait "${pids[@]}" 2>/dev/null || true
    pids=()
}

declare -i beaten=0
beat() {
    [[ -n "${lease}" ]] || return 0
    ((SECONDS >= beaten)) || return 0
    beaten=SECONDS+lease/4+1
    curl --silent --request POST --header "@${WORK}/headers" --max-time 5 --output /dev/null \
        "${URL}/api/v1/rayjobs/${job}/heartbeat" || true
}

[[ -n "${job}" ]] || submit "$@"
say "job ${job} at ${URL}/api/v1/rayjobs/${job}"
outputs="${GITHUB_OUTPUT:-/dev/null}"
printf 'job_id=%s\n' "${job}" >>"${outputs}"
trap 'interrupted 130' INT
trap 'interrupted 143' TERM

# The runner obeys `::command::` in whatever is printed, until a word that no job can know.
stop=""
if [[ "${CI}" == true ]]; then
    read -r stop </proc/sys/kernel/random/uuid
    printf '::stop-commands::%s\n' "${stop}"
fi

code="" verdict="" word="UNKNOWN"
declare -i heard=0 news=SECONDS failures=0 before=0
while [[ -z "${code}" ]]; do
    before=cursor heard=SECONDS
    follow
    [[ -z "${code}" ]] || break
    ((deadline == 0 || SECONDS < deadline)) || break
    status=""
    read -r status <"${WORK}/status" || true
    case "${status}" in
        401 | 403) verdict="the service refuses (${status})" code=77 ;;
        404 | 422 | 400) verdict="the service knows no such watch (${status})" code=78 ;;
        *)
            if ((cursor > before)); then
                news=SECONDS failures=0
            fi
            if ((SECONDS - news >= patience)); then
                verdict="verdict not obtainable; job ${job} may still run: --job ${job} --after-seq ${cursor}" code=75
                break
            fi
            ((failures > 0)) || say "connection lost (${status:-cut}); going on after event ${cursor}"
            failures+=1
            # 0.1 s, then longer up to 5 s; random, so that many clients do not return together.
            printf -v pause '0.%03d' "$((RANDOM % 100 + 50))"
            ((failures < 4)) || pause="$((RANDOM % 4 + 1)).5"
            sleep "${pause}"
            ;;
    esac
done

[[ -z "${stop}" ]] || printf '::%s::\n' "${stop}"
printf 'verdict=%s\n' "${word}" >>"${outputs}"
printf '%s; job %s\n' "${verdict:-left before the verdict}" "${job}" >&2
((signalled == 0)) || exit "${signalled}"
finish "${code:-75}"
