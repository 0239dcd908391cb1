// SPDX-License-Identifier: Apache-2.0

// Package flags reads the command lines of inference engines and says what does not fit together for KV transfer.
//
// [Parse] reads how one engine is started: vLLM (with LMCache's own settings), SGLang or TensorRT-LLM. [Check] compares
// the engines of one deployment with each other and with the connector of the gateway in front of them. Most faults
// that it finds cause no error in a request: engines that cannot hand over KV compute each prompt twice and answer 200.
//
// Neither function opens connections, reads files or looks at its own process. The caller gives Parse the files that an
// engine's command line names. Of the environment and the arguments the package keeps only what the rules compare, so
// no finding can show a key or a token.
package flags

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/cmd/pdctl/launch"
	"github.com/pdkit/pdkit/discovery"
)

// ErrNoEngine says that a command line does not start an engine that this package knows.
var ErrNoEngine = errors.New("no vLLM, SGLang or TensorRT-LLM server is started")

// A vLLM of unknown release is taken for the newest one of PyPI at a date.
const (
	Assumed     = "0.33.0"
	AssumedDate = "November 2026"
)

// Engine is one engine, as its flags describe it. The caller adds Name, Node and Version, which the flags do not have.
type Engine struct {
	Name    string         // its name in findings
	Node    string         // the machine, or the pod with a network of its own; "" if unknown
	Version launch.Version // the zero value if unknown, which stands for [Assumed]
	Program string         // vllm, sglang or trtllm
	Role    discovery.Role // the role that its flags give it; 0 if none
	Host    string         // the host on which it listens; "" is the engine's default
	Port    int            // 0 is the engine's default
	Model   string         // the model that it loads
	Served  []string       // the names that requests use, if they differ
	TP      int            // tensor parallel size, at least 1
	PP      int            // pipeline parallel size, at least 1
	DP      int            // data parallel size, at least 1

	Encoder  *Encoder       // vLLM's --ec-transfer-config; nil without one
	Transfer *Transfer      // vLLM's --kv-transfer-config; nil without one
	LMCache  map[string]any // LMCache's settings by their names in its file; nil without LMCache
	Mooncake map[string]any // Mooncake's store settings by their names in its file; nil without MooncakeStoreConnector
	Unread   []string       // configuration files that it names and the caller did not give

	args map[string]string
	env  map[string]string
}

// Transfer is vLLM's kv_transfer_config (vllm/config/kv_transfer.py).
type Transfer struct {
	Class         string
	Role          string // kv_producer, kv_consumer, kv_both
	EngineID      string
	FailurePolicy string // "" is the engine's default
	Port, Rank    string // kv_port and kv_rank as they are written; "" is the engine's default
	Extra         map[string]any
	Children      []Transfer // of a MultiConnector
}

// Encoder is vLLM's ec_transfer_config (vllm/config/ec_transfer.py), for an encode stage before prefill.
type Encoder struct {
	Class string
	Role  string // ec_producer, ec_consumer, ec_both
	Extra map[string]any
}

// Leaves returns the children of a MultiConnector, or the transfer itself. Of Dynamo's PdConnector it returns the last
// child alone, which moves KV: the first is a tier of P's own.
func (t *Transfer) Leaves() []*Transfer {
	if t == nil {
		return nil
	}
	if len(t.Children) == 0 {
		return []*Transfer{t}
	}
	if t.Class == "PdConnector" {
		return t.Children[len(t.Children)-1].Leaves()
	}
	var all []*Transfer
	for i := range t.Children {
		all = append(all, t.Children[i].Leaves()...)
	}
	return all
}

// keptEnv and keptArgs are the variables and arguments that the rules use.
var (
	keptEnv = []string{
		"PYTHONHASHSEED", "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_MOONCAKE_BOOTSTRAP_PORT",
		"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "VLLM_P2P_SIDE_CHANNEL_HOST", "VLLM_P2P_SIDE_CHANNEL_PORT",
		"VLLM_SSM_CONV_STATE_LAYOUT", "VLLM_NIXL_ABORT_REQUEST_TIMEOUT", "VLLM_EC_SIDE_CHANNEL_HOST",
	}
	keptArgs = []string{
		"block-size", "kv-cache-dtype", "dtype", "prefix-caching-hash-algo", "page-size", "mamba-cache-dtype",
		"mamba-ssm-cache-dtype", "mamba-block-size",
		"mamba-cache-mode", "disaggregation-transfer-backend", "disaggregation-bootstrap-port", "transceiver-backend",
	}
)

// Parse reads the command line of an engine; argv[0] is the program. env is its environment. files are the
// configuration files that argv and env name, by the names that they use: one mapping each, in YAML or JSON. The error
// is [ErrNoEngine], or says which argument cannot be read, without its value.
func Parse(argv []string, env map[string]string, files map[string][]byte) (Engine, error) {
	program, rest := find(argv)
	e := Engine{Program: program, TP: 1, PP: 1, DP: 1, env: map[string]string{}, args: map[string]string{}}
	for _, name := range keptEnv {
		if v, ok := env[name]; ok {
			e.env[name] = v
		}
	}
	var err error
	switch program {
	case "vllm":
		err = e.vllm(rest, env, files)
	case "sglang":
		err = e.sglang(rest)
	case "trtllm":
		err = e.trtllm(rest, files)
	default:
		return Engine{}, ErrNoEngine
	}
	if err != nil {
		return Engine{}, err
	}
	return e, nil
}

// modules are the Python modules of the servers.
var modules = map[string]string{
	"vllm.entrypoints.openai.api_server": "vllm",
	"vllm.entrypoints.api_server":        "vllm",
	"vllm.entrypoints.cli.main":          "vllm",
	"sglang.launch_server":               "sglang",
	"sglang.srt.entrypoints.http_server": "sglang",
}

// find finds the server in a command line, after whatever starts it (python, numactl, env), and returns the arguments
// that follow.
func find(argv []string) (program string, rest []string) {
	for i, a := range argv {
		next := ""
		if i+1 < len(argv) {
			next = argv[i+1]
		}
		switch base := path.Base(a); {
		case (base == "vllm" || base == "sglang") && next == "serve":
			return base, argv[i+2:]
		case base == "trtllm-serve":
			rest = argv[i+1:]
			if next == "serve" {
				rest = rest[1:]
			}
			return "trtllm", rest
		case a == "-m" && modules[next] != "":
			rest = argv[i+2:]
			if len(rest) > 0 && rest[0] == "serve" {
				rest = rest[1:]
			}
			return modules[next], rest
		case strings.HasSuffix(a, "vllm/entrypoints/openai/api_server.py"):
			return "vllm", argv[i+1:]
		case strings.HasSuffix(a, "sglang/launch_server.py"):
			return "sglang", argv[i+1:]
		}
	}
	return "", nil
}

// arguments are a command line's flags. Their names have no dashes at the front, and dashes inside. A later flag
// overrides an earlier one, as in argparse.
type arguments struct {
	positional []string
	flags      map[string]string
	dotted     map[string]map[string]string // --kv-transfer-config.kv_role: by flag, then path
	lists      map[string][]string          // flags that take several values
}

// split reads a command line. short are the names with one dash. severals are the flags that take all values up to the
// next flag.
func split(argv []string, short map[string]string, severals ...string) arguments {
	a := arguments{flags: map[string]string{}, dotted: map[string]map[string]string{}, lists: map[string][]string{}}
	for i := 0; i < len(argv); i++ {
		name, isLong := strings.CutPrefix(argv[i], "--")
		var value string
		var given bool
		if isLong {
			name, value, given = strings.Cut(name, "=")
		} else {
			flag, v, eq := strings.Cut(argv[i], "=")
			long, known := short[flag]
			if !known {
				if !strings.HasPrefix(flag, "-") {
					a.positional = append(a.positional, argv[i])
				}
				continue
			}
			name, value, given = long, v, eq
		}
		name, inner, isDotted := strings.Cut(name, ".")
		name = strings.ReplaceAll(name, "_", "-")
		if slices.Contains(severals, name) {
			values := []string{}
			if given {
				values = append(values, value)
			}
			for i+1 < len(argv) && !strings.HasPrefix(argv[i+1], "-") {
				i++
				values = append(values, argv[i])
			}
			a.lists[name] = values
			continue
		}
		if !given && i+1 < len(argv) && takesValue(name) && isValue(argv[i+1]) {
			i++
			value = argv[i]
		}
		if isDotted {
			if a.dotted[name] == nil {
				a.dotted[name] = map[string]string{}
			}
			a.dotted[name][inner] = value
			continue
		}
		a.flags[name] = value
	}
	return a
}

// takesValue reports whether a flag takes a value. It recognizes switches by their names: the word after a switch may
// be a model's name.
func takesValue(name string) bool {
	for _, prefix := range []string{"enable-", "disable-", "no-", "trust-", "enforce-", "skip-", "use-"} {
		if strings.HasPrefix(name, prefix) {
			return false
		}
	}
	return true
}

func isValue(s string) bool {
	if !strings.HasPrefix(s, "-") {
		return true
	}
	_, err := strconv.ParseFloat(s, 64)
	return err == nil
}

// first returns the value of the first of the names that is given.
func (a arguments) first(names ...string) string {
	for _, n := range names {
		if v := a.flags[n]; v != "" {
			return v
		}
	}
	return ""
}

// number reads a whole number that is at least low, or returns def if the flag is missing.
func (a arguments) number(def, low int, names ...string) (int, error) {
	text := a.first(names...)
	if text == "" {
		return def, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < low {
		return 0, fmt.Errorf("--%s is not a whole number from %d on", names[0], low)
	}
	return n, nil
}

// sizes reads the parallel sizes, which each kind of engine has under several names.
func (e *Engine) sizes(a arguments, tp, pp, dp []string) error {
	var errs [4]error
	e.TP, errs[0] = a.number(1, 1, tp...)
	e.PP, errs[1] = a.number(1, 1, pp...)
	e.DP, errs[2] = a.number(1, 1, dp...)
	e.Port, errs[3] = a.number(0, 1, "port")
	e.Host = a.flags["host"]
	for _, name := range keptArgs {
		if v, ok := a.flags[name]; ok {
			e.args[name] = v
		}
	}
	return errors.Join(errs[:]...)
}

// Address is the engine's host and port, for a reader; "" if its flags do not have them.
func (e *Engine) Address() string {
	if e.Port == 0 {
		return ""
	}
	return e.Host + ":" + strconv.Itoa(e.Port)
}

// Classes returns the connector classes of the engine, those of a MultiConnector's children included, sorted.
func (e *Engine) Classes() []string {
	set := map[string]bool{}
	for _, t := range e.Transfer.Leaves() {
		set[t.Class] = true
	}
	return slices.Sorted(maps.Keys(set))
}
