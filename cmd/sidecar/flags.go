// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/cmd/internal/cmdline"
)

// flags has the names and defaults of llm-d-router ebab6879, pkg/sidecar/proxy/options.go, those of 0186107d after it,
// and those of earlier releases whose flags KServe and llm-d's charts still write. The README compares each flag.
type flags struct {
	port, modelServerPort int
	ranks                 int    // --data-parallel-size
	podIP                 string // POD_IP
	kvConnector           string
	connectorConfig       string
	mooncakePort, p2pPort int
	sglangPort            int // SGLANG_BOOTSTRAP_PORT; llm-d has no flag for it
	moriio                moriioFlags
	ecConnector           string
	sampling              bool
	requireHeader         bool     // refuse requests that name no prefill engine
	forward               []string // headers of clients that engines get besides the usual ones
	retries               int
	backoff               time.Duration
	maxIdle               int

	secure   bool
	certPath string
	minTLS   uint16
	ciphers  []uint16
	tls      stages // the stages whose engines are reached over TLS
	insecure stages // the stages whose certificates are not verified

	prefill  listFlags
	encode   listFlags
	file     string
	resolver string
	pool     poolFlags

	metrics, metricsCert string // an address, and the folder of the certificate there
	tracing              bool
	level                slog.Level
	json                 bool     // the log is JSON
	warnings             []string // about flags that are accepted and have no effect
	version              bool     // print the version and end
}

// listFlags are flags that list the engines of one role that requests may name.
type listFlags struct{ static, dns string }

// stages are the stages that a TLS flag names.
type stages struct{ prefiller, decoder, encoder bool }

func (s *stages) set(text string) error {
	for name := range strings.SplitSeq(text, ",") {
		switch strings.TrimSpace(name) {
		case "prefiller":
			s.prefiller = true
		case "decoder":
			s.decoder = true
		case "encoder":
			s.encoder = true
		default:
			return errors.New("want prefiller, decoder or encoder, or several, separated by commas")
		}
	}
	return nil
}

const maxRanks = 1024 // each rank has a listener

// parseFlags reads the command line and the configuration that it names. It writes an error to stderr, and returns
// flag.ErrHelp or cmdline.ErrWrong.
func parseFlags(args []string, getenv func(string) string, stderr io.Writer) (*flags, error) {
	f := &flags{podIP: getenv("POD_IP"), sglangPort: port(getenv, "SGLANG_BOOTSTRAP_PORT", 8998)}
	fs := flag.NewFlagSet("sidecar", flag.ContinueOnError)
	modelServer, vllm := -1, -1
	f.serving(fs, &modelServer, &vllm)
	f.engines(fs, getenv)
	f.lists(fs, getenv)
	f.telemetry(fs, getenv)
	f.withoutEffect(fs)
	f.moriio.define(fs, getenv)
	fs.BoolVar(&f.version, "version", false, "print the version and end")
	inline := fs.String("configuration", "", "the flags that are not on the command line, as `YAML`")
	file := fs.String("configuration-file", "", "the same in a `FILE`")

	rest := args
	for {
		if err := cmdline.Parse(fs, rest, stderr); err != nil || f.version {
			return f, err
		}
		// A template leaves an empty argument if its condition is false (KServe's does without TLS).
		if rest = fs.Args(); len(rest) == 0 || rest[0] != "" {
			break
		}
		rest = rest[1:]
	}
	problem := ""
	if err := configure(fs, *inline, *file); err != nil {
		problem = err.Error()
	}
	f.modelServerPort = 8200
	if p := max(modelServer, vllm); p >= 0 {
		f.modelServerPort = p
		if modelServer >= 0 {
			f.modelServerPort = modelServer
		}
	}
	if f.insecure.prefiller && !f.tls.prefiller || f.insecure.decoder && !f.tls.decoder ||
		f.insecure.encoder && !f.tls.encoder {
		f.warn("--tls-insecure-skip-verify has no effect on a stage that --enable-tls does not name")
	}
	if f.certPath != "" && !f.secure {
		f.warn("--cert-path has no effect without --secure-serving")
	}
	if problem = cmp.Or(problem, f.check(rest)); problem != "" {
		return nil, cmdline.Wrong(fs, stderr, problem)
	}
	return f, nil
}

// serving defines the flags about the sidecar's own ports.
func (f *flags) serving(fs *flag.FlagSet, modelServer, vllm *int) {
	fs.IntVar(&f.port, "port", 8000, "the `PORT` that clients connect to")
	fs.IntVar(modelServer, "model-server-port", -1, "the `PORT` of the decode engine on this host (default 8200)")
	fs.IntVar(vllm, "vllm-port", -1, "the old name of --model-server-port")
	fs.IntVar(&f.ranks, "data-parallel-size", 1, "decode engines on this host: `RANK` r of them is at "+
		"--model-server-port + r and served at --port + r")
	fs.BoolVar(&f.secure, "secure-serving", true, "serve clients over TLS")
	fs.BoolVar(&f.secure, "secure-proxy", true, "the old name of --secure-serving")
	fs.StringVar(&f.certPath, "cert-path", "", "the `FOLDER` of tls.crt and tls.key for --secure-serving; without it "+
		"a certificate is made, which nobody can check")
	f.minTLS = tls.VersionTLS12
	fs.Func("tls-min-version", "the lowest `VERSION` towards clients: VersionTLS12 (default) or VersionTLS13",
		func(s string) error {
			v, ok := map[string]uint16{"": tls.VersionTLS12, "VersionTLS12": tls.VersionTLS12,
				"VersionTLS13": tls.VersionTLS13}[s]
			if !ok {
				return errors.New("want VersionTLS12 or VersionTLS13")
			}
			f.minTLS = v
			return nil
		})
	fs.Func("tls-cipher-suites", "the `SUITES` of TLS 1.2 towards clients, by the names of crypto/tls, separated "+
		"by commas", func(s string) error {
		for name := range strings.SplitSeq(s, ",") {
			if name = strings.TrimSpace(name); name == "" {
				continue
			}
			i := slices.IndexFunc(tls.CipherSuites(), func(c *tls.CipherSuite) bool { return c.Name == name })
			if i < 0 {
				return errors.New("there is no such cipher suite, or it is not safe")
			}
			f.ciphers = append(f.ciphers, tls.CipherSuites()[i].ID)
		}
		return nil
	})
}

// engines defines the flags about connections to engines.
func (f *flags) engines(fs *flag.FlagSet, getenv func(string) string) {
	fs.StringVar(&f.kvConnector, "kv-connector", "nixlv2",
		"how KV moves: `NAME` is nixlv2, shared-storage, sglang, mooncake, offloading, lmcache, or one of pdkit's "+
			"connectors")
	fs.Func("connector", "the old name of --kv-connector", func(s string) error { f.kvConnector = s; return f.notV1() })
	fs.StringVar(&f.connectorConfig, "kv-connector-config", "",
		"further settings of the connector, as `JSON`; the connector's README lists them")
	fs.IntVar(&f.mooncakePort, "mooncake-bootstrap-port", port(getenv, "MOONCAKE_BOOTSTRAP_PORT", 8998),
		"the `PORT` of prefill engines' bootstrap servers, for mooncake")
	fs.IntVar(&f.p2pPort, "p2p-connector-port", port(getenv, "P2P_CONNECTOR_PORT", 7777),
		"the `PORT` of prefill engines' P2P tiers, of rank 0, for offloading")
	fs.StringVar(&f.ecConnector, "ec-connector", "", "an encode stage before prefill: `NAME` is ec-example or ec-nixl")
	sampling, _ := strconv.ParseBool(getenv("ENABLE_PREFILLER_SAMPLING"))
	fs.BoolVar(&f.sampling, "enable-prefiller-sampling", sampling,
		"of several engines in the header, try a random one first")
	fs.BoolVar(&f.requireHeader, "require-prefiller-header", false, "answer 400 to requests that name no prefill "+
		"engine, in place of having the decode engine serve them alone")
	fs.Func("forward-headers", "further `HEADERS` of clients that both engines get, separated by commas",
		func(s string) error {
			f.forward = append(f.forward, strings.FieldsFunc(s, func(r rune) bool { return r == ',' || r == ' ' })...)
			return nil
		})
	fs.IntVar(&f.retries, "prefill-max-retries", 0, "further `ATTEMPTS` after one that failed by an engine's fault")
	fs.DurationVar(&f.backoff, "prefill-retry-backoff", 200*time.Millisecond,
		"the pause before the first of them; it doubles")
	fs.IntVar(&f.maxIdle, "max-idle-conns-per-host", 1024, "unused connections kept for each engine")
	fs.Func("enable-tls", "the `STAGES` (prefiller,decoder,encoder) that are asked over TLS", f.tls.set)
	fs.Func("tls-insecure-skip-verify", "the `STAGES` whose certificates are not verified", f.insecure.set)
	for name, stage := range map[string]*bool{
		"prefiller-use-tls": &f.tls.prefiller, "decoder-use-tls": &f.tls.decoder,
		"prefiller-tls-insecure-skip-verify": &f.insecure.prefiller,
		"decoder-tls-insecure-skip-verify":   &f.insecure.decoder,
	} {
		fs.BoolFunc(name, "the old form of --enable-tls and --tls-insecure-skip-verify", func(s string) error {
			on, err := strconv.ParseBool(s)
			*stage = *stage || on // as in llm-d, each form adds stages and none removes one
			return err
		})
	}
}

// lists defines the flags about the engines that a request may name.
func (f *flags) lists(fs *flag.FlagSet, getenv func(string) string) {
	fs.StringVar(&f.prefill.static, "prefillers", "", "the prefill engines that a request may name: `HOST:PORT,…`, "+
		"or HOST:FIRST-LAST for the ports of data-parallel ranks")
	fs.StringVar(&f.prefill.dns, "prefillers-dns", "", "the same as a name, `NAME:PORT` or NAME:FIRST-LAST for its "+
		"addresses (a headless service), or NAME for its SRV records")
	fs.StringVar(&f.encode.static, "encoders", "", "the encode engines that a request may name, as --prefillers")
	fs.StringVar(&f.encode.dns, "encoders-dns", "", "the same as a `NAME`, as --prefillers-dns")
	fs.StringVar(&f.file, "prefillers-file", "", "prefill and encode engines as a `FILE` that is watched (see "+
		"package discovery/file)")
	fs.StringVar(&f.resolver, "prefillers-dns-server", "",
		"the `HOST:PORT` to ask for names (default: those of /etc/resolv.conf)")

	f.pool = poolFlags{group: poolGroup, namespace: getenv("INFERENCE_POOL_NAMESPACE"),
		name: getenv("INFERENCE_POOL_NAME"), kubeconfig: getenv("KUBECONFIG")}
	if both := getenv("INFERENCE_POOL"); both != "" {
		if err := f.pool.set(both); err != nil {
			f.warn("INFERENCE_POOL is ignored: " + err.Error())
		}
	}
	fs.Func("inference-pool", "without a list, the InferencePool whose pods a request may name: `NAMESPACE/NAME`, or "+
		"NAME in the namespace default", f.pool.set)
	fs.StringVar(&f.pool.name, "inference-pool-name", f.pool.name, "the old form of --inference-pool")
	fs.StringVar(&f.pool.namespace, "inference-pool-namespace", f.pool.namespace, "the old form of --inference-pool")
	fs.StringVar(&f.pool.group, "pool-group", f.pool.group, "the API `GROUP` of the InferencePool")
	fs.BoolFunc("enable-ssrf-protection", "of llm-d's sidecar; here it is always on", func(s string) error {
		on, err := strconv.ParseBool(s)
		if err == nil && !on {
			f.warn("--enable-ssrf-protection=false is ignored: a request names only engines that are listed")
		}
		return err
	})
}

// telemetry defines the flags about metrics, traces and the log.
func (f *flags) telemetry(fs *flag.FlagSet, getenv func(string) string) {
	f.metrics = strings.TrimSpace(getenv("MORIIO_METRICS_ADDR"))
	fs.Func("metrics-port", "serve metrics at this `PORT`, path /metrics; 0: nowhere", func(s string) error {
		n, err := strconv.ParseUint(s, 10, 16)
		if err != nil {
			return errors.New("want a port, or 0")
		}
		if n > 0 {
			f.metrics = ":" + s
		}
		return nil
	})
	fs.StringVar(&f.metricsCert, "metrics-cert-dir", "",
		"the `FOLDER` of tls.crt and tls.key for --metrics-port; without it metrics are served in the clear")
	fs.BoolVar(&f.tracing, "tracing", false, "make spans; OTEL_TRACES_EXPORTER, OTEL_TRACES_SAMPLER_ARG and "+
		"OTEL_SERVICE_NAME are heeded")
	fs.TextVar(&f.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	fs.Func("zap-log-level", "llm-d's form of --log-level: a `LEVEL`, or a number, of which 4 and above are debug",
		f.zapLevel)
	fs.Func("v", "klog's form of it", f.zapLevel)
	fs.Func("zap-encoder", "the log's `FORM`: json or console (default)", func(s string) error {
		if f.json = s == "json"; !f.json && s != "console" {
			return errors.New("want json or console")
		}
		return nil
	})
}

func (f *flags) zapLevel(s string) error {
	if n, err := strconv.Atoi(s); err == nil {
		f.level = slog.LevelInfo
		if n >= 4 { // llm-d's DEBUG (pkg/common/observability/logging)
			f.level = slog.LevelDebug
		}
		return nil
	}
	level, ok := map[string]slog.Level{"debug": slog.LevelDebug, "info": slog.LevelInfo, "error": slog.LevelError,
		"panic": slog.LevelError}[s]
	if !ok {
		return errors.New("want debug, info, error, panic or a number")
	}
	f.level = level
	return nil
}

func (f *flags) warn(text string) { f.warnings = append(f.warnings, text) }

func port(getenv func(string) string, name string, otherwise int) int {
	if n, err := strconv.Atoi(getenv(name)); err == nil {
		return n
	}
	return otherwise
}

func (f *flags) notV1() error {
	if f.kvConnector == "nixl" {
		return errors.New("nixl was the first version of NIXL's protocol, which engines no longer speak: want nixlv2")
	}
	return nil
}

func (f *flags) check(rest []string) string {
	switch {
	case len(rest) > 0:
		return fmt.Sprintf("unexpected argument %q", rest[0])
	case f.ranks < 1 || f.ranks > maxRanks:
		return fmt.Sprintf("--data-parallel-size is not one of 1 to %d", maxRanks)
	case f.port < 0 || f.port+f.ranks-1 > 65535:
		return "--port is not one of 0 (any) to 65535, or --data-parallel-size leads beyond that"
	case f.modelServerPort < 1 || f.modelServerPort+f.ranks-1 > 65535:
		return "--model-server-port is not one of 1 to 65535, or --data-parallel-size leads beyond that"
	case f.port > 0 && f.port < f.modelServerPort+f.ranks && f.modelServerPort < f.port+f.ranks:
		return "--port is a decode engine's: the sidecar would call itself"
	case f.resolver != "" && f.prefill.dns == "" && f.encode.dns == "":
		return "--prefillers-dns-server has no use without --prefillers-dns or --encoders-dns"
	case f.retries < 0 || f.backoff < 0 || f.maxIdle < 1:
		return "--prefill-max-retries and --prefill-retry-backoff must not be negative, and " +
			"--max-idle-conns-per-host must be 1 or more"
	case f.ecConnector != "" && f.ecConnector != "ec-example" && f.ecConnector != "ec-nixl":
		return "--ec-connector is not ec-example or ec-nixl"
	case f.metricsAddress() != "":
		return f.metricsAddress()
	}
	return cmp.Or(f.checkLists(), f.moriio.check(f))
}

// metricsAddress says what is wrong with the address of the metrics, or returns "".
func (f *flags) metricsAddress() string {
	if f.metrics == "" {
		return ""
	}
	_, text, err := net.SplitHostPort(f.metrics)
	n, perr := strconv.Atoi(text)
	switch {
	case err != nil || perr != nil || n < 0 || n > 65535:
		return "MORIIO_METRICS_ADDR is not HOST:PORT"
	case f.port > 0 && n >= f.port && n < f.port+f.ranks:
		return "--metrics-port is one of the sidecar's own ports"
	}
	return ""
}
