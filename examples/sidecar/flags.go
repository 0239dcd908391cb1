// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pdkit/pdkit/connector"
)

// Names and defaults are those of llm-d-router ebab6879, pkg/sidecar/proxy/options.go, and of llm-d-routing-sidecar
// 78051b86, cmd/llm-d-routing-sidecar/main.go, which came before it.
type flags struct {
	port, modelServerPort int
	kvConnector           string
	connectorConfig       string
	mooncakePort, p2pPort int
	sglangPort            int // SGLANG_BOOTSTRAP_PORT; llm-d has no flag for it either
	sampling              bool
	retries               int
	backoff               time.Duration
	maxIdle               int

	secure   bool
	certPath string
	tls      stages // over which engines are asked
	insecure stages // whose certificates are not looked at

	prefillers     string
	prefillersFile string
	prefillersDNS  string
	resolver       string
	level          slog.Level
}

// stages are the parties whose connections flags speak of.
type stages struct{ prefiller, decoder bool }

func (s *stages) set(text string) error {
	for name := range strings.SplitSeq(text, ",") {
		switch strings.TrimSpace(name) {
		case "prefiller":
			s.prefiller = true
		case "decoder":
			s.decoder = true
		default:
			return errors.New("want prefiller, decoder or both, separated by a comma")
		}
	}
	return nil
}

// elsewhere are flags of llm-d's sidecar that this one does not have. The value that means "off" is taken, so that a manifest that
// spells out defaults works; any other ends the start, since a request would not be served as its author thinks.
var elsewhere = map[string]struct {
	off  []string
	what string
}{
	"data-parallel-size":       {[]string{"1"}, "a port for each rank: start one sidecar for each"},
	"ec-connector":             {[]string{""}, "an encode stage"},
	"enable-p2p-pull":          {[]string{"false"}, "pulls of cached prefixes"},
	"decode-chunk-size":        {[]string{"0"}, "decoding in chunks"},
	"metrics-port":             {[]string{"0"}, "metrics: examples/gateway shows how to add them"},
	"tracing":                  {[]string{"false"}, "traces: examples/gateway shows how to add them"},
	"configuration":            {[]string{""}, "a configuration beside the flags"},
	"configuration-file":       {[]string{""}, "a configuration beside the flags"},
	"inference-pool":           {nil, "InferencePools: name the prefill engines by --prefillers, --prefillers-file or --prefillers-dns"},
	"inference-pool-name":      {nil, "InferencePools: name the prefill engines by --prefillers, --prefillers-file or --prefillers-dns"},
	"inference-pool-namespace": {nil, "InferencePools: name the prefill engines by --prefillers, --prefillers-file or --prefillers-dns"},
	"pool-group":               {nil, "InferencePools: name the prefill engines by --prefillers, --prefillers-file or --prefillers-dns"},
	"enable-ssrf-protection":   {[]string{"true"}, "a way to switch the list of prefill engines off"},
	"moriio-write-mode":        {[]string{"false"}, "MoRI-IO's write mode"},
}

var errUsage = errors.New("usage")

// parseFlags reads the command line. The error has been written to stderr; it is flag.ErrHelp or errUsage.
func parseFlags(args []string, getenv func(string) string, stderr io.Writer) (*flags, error) {
	f := &flags{modelServerPort: 8200}
	fs := flag.NewFlagSet("sidecar", flag.ContinueOnError)
	fs.SetOutput(stderr)
	fs.IntVar(&f.port, "port", 8000, "the `PORT` that clients connect to")
	modelServer := fs.Int("model-server-port", 0, "the `PORT` of the decode engine on this host (default 8200)")
	fs.IntVar(&f.modelServerPort, "vllm-port", 8200, "the old name of --model-server-port")
	fs.StringVar(&f.kvConnector, "kv-connector", "nixlv2", "how KV moves: `NAME` is nixlv2, shared-storage, sglang, mooncake, offloading, lmcache, or one of pdkit's connectors")
	fs.Func("connector", "the old name of --kv-connector", func(s string) error { f.kvConnector = s; return f.notV1() })
	fs.StringVar(&f.connectorConfig, "kv-connector-config", "", "further settings of the connector, as `JSON`; the connector's README lists them")
	fs.IntVar(&f.mooncakePort, "mooncake-bootstrap-port", port(getenv, "MOONCAKE_BOOTSTRAP_PORT", 8998), "the `PORT` of prefill engines' bootstrap servers, for mooncake")
	fs.IntVar(&f.p2pPort, "p2p-connector-port", port(getenv, "P2P_CONNECTOR_PORT", 7777), "the `PORT` of prefill engines' P2P tiers, for offloading")
	f.sglangPort = port(getenv, "SGLANG_BOOTSTRAP_PORT", 8998)
	sampling, _ := strconv.ParseBool(getenv("ENABLE_PREFILLER_SAMPLING"))
	fs.BoolVar(&f.sampling, "enable-prefiller-sampling", sampling, "of several engines in the header, try a random one first")
	fs.IntVar(&f.retries, "prefill-max-retries", 0, "further `ATTEMPTS` after one that failed by an engine's fault")
	fs.DurationVar(&f.backoff, "prefill-retry-backoff", 200*time.Millisecond, "the pause before the first of them; it doubles")
	fs.IntVar(&f.maxIdle, "max-idle-conns-per-host", 1024, "unused connections kept for each engine")
	fs.BoolVar(&f.secure, "secure-proxy", true, "serve clients over TLS")
	fs.StringVar(&f.certPath, "cert-path", "", "the `FOLDER` of tls.crt and tls.key for --secure-proxy; without it a certificate is made, which nobody can check")
	fs.Func("enable-tls", "the `STAGES` (prefiller,decoder) that are asked over TLS", f.tls.set)
	fs.Func("tls-insecure-skip-verify", "the `STAGES` whose certificates are not verified", f.insecure.set)
	fs.StringVar(&f.prefillers, "prefillers", "", "the prefill engines that a request may name: `HOST:PORT,…`")
	fs.StringVar(&f.prefillersFile, "prefillers-file", "", "the same as a `FILE` that is watched (see package discovery/file)")
	fs.StringVar(&f.prefillersDNS, "prefillers-dns", "", "the same as a name, `NAME:PORT` for its addresses (a headless service) or NAME for its SRV records")
	fs.StringVar(&f.resolver, "prefillers-dns-server", "", "the `HOST:PORT` to ask for it (default: those of /etc/resolv.conf)")
	fs.TextVar(&f.level, "log-level", slog.LevelInfo, "debug, info, warn or error")
	for name, x := range elsewhere {
		refuse := func(value string) error {
			if slices.Contains(x.off, value) {
				return nil
			}
			return errors.New("there is no " + x.what)
		}
		if slices.Contains(x.off, "true") || slices.Contains(x.off, "false") {
			fs.BoolFunc(name, "of llm-d's sidecar; not here", refuse)
		} else {
			fs.Func(name, "of llm-d's sidecar; not here", refuse)
		}
	}
	if err := fs.Parse(args); err != nil {
		if !errors.Is(err, flag.ErrHelp) {
			err = errUsage
		}
		return nil, err
	}
	if *modelServer != 0 {
		f.modelServerPort = *modelServer
	}
	if problem := f.check(fs.Args()); problem != "" {
		fmt.Fprintln(stderr, "sidecar:", problem)
		return nil, errUsage
	}
	return f, nil
}

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
	case f.port < 0 || f.port > 65535:
		return "--port is not one of 0 (any) to 65535"
	case f.modelServerPort < 1 || f.modelServerPort > 65535:
		return "--model-server-port is not one of 1 to 65535"
	case f.port == f.modelServerPort:
		return "--port is the decode engine's: the sidecar would call itself"
	case f.prefillers == "" && f.prefillersFile == "" && f.prefillersDNS == "":
		return "--prefillers, --prefillers-file or --prefillers-dns is missing: without a list anybody who can send a header could have any host called"
	case f.resolver != "" && f.prefillersDNS == "":
		return "--prefillers-dns-server has no use without --prefillers-dns"
	case f.retries < 0 || f.backoff < 0 || f.maxIdle < 1:
		return "--prefill-max-retries and --prefill-retry-backoff must not be negative, and --max-idle-conns-per-host must be 1 or more"
	case f.certPath != "" && !f.secure:
		return "--cert-path has no use with --secure-proxy=false"
	case f.insecure.prefiller && !f.tls.prefiller || f.insecure.decoder && !f.tls.decoder:
		return "--tls-insecure-skip-verify names a stage that --enable-tls does not"
	}
	return ""
}

// connector makes the connector of --kv-connector. llm-d's names are those of pkg/sidecar/constants/constants.go.
func (f *flags) connector() (connector.KVConnector, error) {
	spec := connector.Spec{Type: f.kvConnector}
	config := map[string]any{}
	switch f.kvConnector {
	case "nixlv2":
		spec.Type = "nixl"
	case "shared-storage":
		spec.Type = "sharedstorage"
	case "sglang":
		config["bootstrapPort"] = f.sglangPort
	case "mooncake":
		config["bootstrapPort"] = f.mooncakePort
	case "offloading":
		spec.Type, config["port"] = "offload-p2p", f.p2pPort
	}
	if f.connectorConfig != "" {
		if err := json.Unmarshal([]byte(f.connectorConfig), &config); err != nil || config == nil {
			return nil, errors.New("--kv-connector-config is not a JSON object")
		}
	}
	if len(config) > 0 {
		spec.Config, _ = json.Marshal(config) // of what was JSON, numbers and texts
	}
	c, err := connector.Open(spec)
	if err != nil {
		return nil, fmt.Errorf("--kv-connector: %w", err)
	}
	return c, nil
}
