// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"

	"github.com/alecthomas/kong"
)

// help has the texts of --help that are too long for a line of a struct tag, by the name in the tag.
var help = kong.Vars{
	"verify": "Prove by the engines' own counters that decode takes KV over. Ends with 1 if it does not.",
	"check": "Say what does not fit together in engines' flags. Ends with 1 if requests would fail or " +
		"compute prompts twice.",
	"check_inputs":          "Scripts, Compose files, Kubernetes manifests, rendered Python; - is standard input.",
	"check_file":            "The gateway's configuration: engines are checked against its connector too.",
	"check_command":         "A command line, with its variables in front: 'PYTHONHASHSEED=0 vllm serve …'.",
	"check_engine_version":  "The engines' release, like 0.32.0; otherwise the image's tag, else vLLM's newest.",
	"watch":                 "Show a gateway at work: its engines, its requests, and how long each part of them took.",
	"watch_admin":           "The gateway's admin address (spec.admin), by an IP address or localhost.",
	"watch_rows":            "How many ended attempts to show, at most; a terminal shows those that fit.",
	"render_file":           "The gateway's configuration, or any YAML with ModelServers; - is standard input.",
	"render_format":         "shell, compose, kubernetes or python.",
	"render_engine_version": "The engines' release, like 0.32.0; the newest that is known otherwise.",
	"render_model":          "What the engines load, if it is not spec.model: a hub's name or a folder.",
	"render_gateway": "The host at which engines reach the gateway, for notices and callbacks; loopback " +
		"otherwise.",
	"render_json": "Write the programs as JSON: argv, env, files.",
	"render_prefill": "A prefill engine, with attributes after it: 'http://10.0.0.1:8000 engineID=p0'. " +
		"Replaces those of the file.",
	"verify_file": "The gateway's configuration, for the engines, the connector and the model; or name " +
		"them by the flags below.",
	"verify_gateway": "Ask this gateway, like http://127.0.0.1:8000. Without it, pdctl brings the two " +
		"legs together itself.",
	"verify_prefill": "A prefill engine, with attributes after it: 'http://10.0.0.1:8000 " +
		"bootstrapPort=8998'. Replaces those of the file.",
	"verify_alone": "An engine that serves whole requests, to compare texts with; an engine of the pair " +
		"otherwise, where the protocol lets one.",
	"verify_header": "A header for the gateway, like an Authorization.",
	"verify_engine_key": "A file with the key for the engines' own endpoints (--api-key), sent as " +
		"Authorization: Bearer.",
	"conform": "Test any PD gateway from outside, with simulated vLLM engines (NIXL). Ends with 1 if a rule that " +
		"must hold is broken.",
	"conform_cmd": "Start the gateway by this command, for each case anew. {port} is the port to listen on, {port2} " +
		"and so on are further free ones, {config} is the filled --config. A word with {prefill} or {decode} is " +
		"repeated for each engine's URL, with the flag in front of it.",
	"conform_config": "A configuration with the same placeholders; a line with {prefill} or {decode} is repeated.",
	"conform_setup": "A command to run after the start, until it succeeds; with {prefill} or {decode} for each " +
		"engine. Can be given several times.",
	"conform_url": "Test a gateway that runs, or that you start once the engines listen. Cases that need a process " +
		"are skipped.",
	"conform_engines": "With --url: the first of four ports on 127.0.0.1, for two prefill and two decode engines.",
	"conform_ready":   "The path that answers with 200 once the gateway is ready; '' for none.",
	"conform_only":    "Only these cases, by id or group: cancel, 'stream/cut*'. Can be given several times.",
	"conform_output":  "Write the report to this file. The output then has the cases as they end.",
	"conform_table":   "Print these reports (--format json) side by side, as Markdown, and run nothing.",
	"bench": "Send load to a server with OpenAI's API and measure: TTFT, ITL, throughput, goodput. Ends with 1 if " +
		"requests failed.",
	"bench_url":   "The server's base address, with or without /v1. Twice: two servers are compared, A, then B.",
	"bench_model": "The model to ask for; otherwise the first one that the server lists.",
	"bench_rate": "Open loop: this many requests a second on average, with Poisson arrivals. Several with commas are " +
		"measured one after the other, and give a curve. Also --request-rate.",
	"bench_clients": "Closed loop: so many clients, each of which sends one request after the other. Several as for " +
		"--rate. Also --concurrency.",
	"bench_duration": "How long to load each target; 30s without --requests. Of a sweep: with each load.",
	"bench_requests": "How many requests to send to each target. Of a sweep: with each load. Also --num-prompts.",
	"bench_output":   "Write the report to this file as JSON, too.",
	"bench_prompts": "JSON lines: bodies with prompt or messages, and max_tokens. They are sent in order, again and " +
		"again. Without it, prompts are random words.",
	"bench_prompt_tokens": "The length of each generated prompt after its prefix. Two short requests before the load " +
		"tell how many tokens the server makes of a word. Also --random-input-len.",
	"bench_max_tokens":    "The longest response, in tokens. Also --random-output-len.",
	"bench_prefix_tokens": "The length of a prefix that generated prompts share.",
	"bench_api":           "The API for generated prompts: chat or completions.",
	"bench_ignore_eos":    "Let generated prompts ask for exactly --max-tokens (ignore_eos of vLLM and SGLang).",
	"bench_slo_ttft":      "Goodput counts requests whose first token came within this time.",
	"bench_slo_tpot": "Goodput counts requests whose time per output token, the mean time between two tokens, is at " +
		"most this. Also --slo-itl.",
	"bench_slo_e2e": "Goodput counts requests whose response ended within this time.",
	"bench_seed": "Repeats the prompts and arrivals of a run, whose report tells its seed. A server that caches " +
		"prefixes knows those prompts already.",
	"bench_rounds": "With two servers: the load goes to them in slices A B B A, so many times; each gives a ratio.",
	"bench_header": "A header for each request, like an Authorization.",
	"simulate": "Replay a trace over a fleet of modelled engines in virtual time, with each picking policy: reuse, " +
		"TTFT, ITL, balance.",
	"simulate_trace": "Replay this file of JSON lines (cmd/pdctl/README.md), also in the form of Mooncake's " +
		"published traces, or mooncake for its trace of conversations; otherwise a trace is generated.",
	"simulate_requests": "Send so many requests: a longer trace is cut, a shorter one begins anew with other texts.",
	"simulate_policies": "The policies, comma separated, as for the gateway's -pick; all but kv otherwise.",
	"simulate_seed":     "Of the generated trace and of the policies. The same seed gives the same output.",
	"simulate_budget":   "Tokens that a step computes at most; longer prompts are computed in chunks.",
	"simulate_step": "Microseconds of an engine's step: for the step, for each request in it, for each token of " +
		"context, for each token of a prompt, and, if attention counts, for each pair of such a token and one before " +
		"it. Usual is Llama-3.1-8B on an H100.",
	"simulate_link": "Gigabytes a second of KV within a zone and between two; one number is for both, 0 is without " +
		"bound.",
	"simulate_handshake": "By how much the first transfer of a pair takes longer.",
	"replay": "Decide again what a gateway has decided and recorded (-record-decisions), and end with 1 if a " +
		"decision is another one (--verify). Or tell in virtual time what another policy or number of engines would " +
		"have done.",
	"replay_policy":   "always, never, threshold or predicted, as spec.decision has it.",
	"replay_uncached": "With threshold and predicted: a prompt is not split of which fewer tokens are not cached.",
	"replay_slo":      "Goodput counts by this, and not by the recorded objectives; predicted goes by it, too.",
	"replay_files":    "Files of a gateway's folder; - is standard input.",
	"replay_verify": "Evaluate each decision with the policy that is named in its file, by this program's code, and " +
		"show the first difference.",
	"completion": "Print the script with which a shell completes pdctl's commands and flags.",
}

// ends are the exit statuses of commands. --help and README.md have these texts, and a test returns each of them.
var ends = map[string]string{
	"render":  "0; 2 for a fault in the file or the command line",
	"check":   "0; 1 if an error is found; 2 for an input that cannot be read",
	"verify":  "0 if KV is reused; 1 if not; 2 if nothing could be judged; 130 after Ctrl-C",
	"watch":   "0, after Ctrl-C too; 2 if the gateway does not answer from the start",
	"conform": "0; 1 if a rule that must hold is broken; 2 if the gateway does not start; 130 after Ctrl-C",
	"bench": "0; 1 if requests failed; 2 for a wrong command line or a server that does not answer; 130 after " +
		"Ctrl-C, with the report so far",
	"simulate":   "0; 2 for a wrong command line, or a trace that cannot be read; 130 after Ctrl-C",
	"replay":     "0 if all decisions are alike; 1 if one is not; 2 if none could be read",
	"completion": "0; 2 for another shell",
}

// examples are command lines in --help.
var examples = map[string][]string{
	"render": {"pdctl render -f gateway.yaml > launch.sh",
		"pdctl render -f gateway.yaml --format kubernetes --model /models/m"},
	"check": {"pdctl check -f gateway.yaml launch.sh", "pdctl check --all-local --json"},
	"verify": {"pdctl verify -f gateway.yaml --gateway http://127.0.0.1:8000",
		"pdctl verify --connector nixl --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000"},
	"watch": {"pdctl watch --admin http://127.0.0.1:9000", "pdctl watch --once --json"},
	"conform": {"pdctl conform --cmd 'my-gateway --port {port} --prefill {prefill} --decode {decode}'",
		"pdctl conform --list"},
	"bench": {"pdctl bench --url http://127.0.0.1:8000 --rate 10 --slo-ttft 500ms --slo-tpot 50ms",
		"pdctl bench --url http://127.0.0.1:8000 --concurrency 1,2,4,8,16 --duration 1m --html curve.html",
		"pdctl bench --url http://a:8000 --url http://b:8000 --clients 16 --html report.html"},
	"simulate": {"pdctl simulate --policies round-robin,prefix --slo-ttft 500ms --slo-tpot 15ms",
		"pdctl simulate --trace mooncake --requests 100000 --speed 20 --prefill 32 --decode 32 --policies two-choices"},
	"replay": {"pdctl replay decisions/m.*.jsonl --verify",
		"pdctl replay decisions/m.*.jsonl --policy predicted --prefill 3 --decode 5"},
	"completion": {"source <(pdctl completion bash)", "pdctl completion fish > ~/.config/fish/completions/pdctl.fish"},
}

// details stand below a command's description in its --help.
func details(command string) string {
	return "Examples:\n\n  " + strings.Join(examples[command], "\n  ") + "\n\nExit status: " + ends[command] + "."
}

func (*renderCmd) Help() string     { return details("render") }
func (*checkCmd) Help() string      { return details("check") }
func (*verifyCmd) Help() string     { return details("verify") }
func (*watchCmd) Help() string      { return details("watch") }
func (*conformCmd) Help() string    { return details("conform") }
func (*benchCmd) Help() string      { return details("bench") }
func (*simulateCmd) Help() string   { return details("simulate") }
func (*replayCmd) Help() string     { return details("replay") }
func (*completionCmd) Help() string { return details("completion") }
