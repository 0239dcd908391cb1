// SPDX-License-Identifier: Apache-2.0

package mooncake

import (
	"errors"
	"net"
	"strconv"
	"time"

	"github.com/pdkit/pdkit/config"
)

// Defaults of the settings.
const (
	DefaultBootstrapPort = 8998 // vLLM's VLLM_MOONCAKE_BOOTSTRAP_PORT
	DefaultEngineTTL     = 30 * time.Second
	DefaultAbortTimeout  = 480 * time.Second // vLLM's VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
)

const dispatchTogether, dispatchSerial = "together", "serial"

// Options are the connector's settings. The first three are pdkit's own. The others are the engines', under the
// engines' names; they are only rendered.
type Options struct {
	// BootstrapPort is where P's bootstrap server listens, for engines without the attribute bootstrapPort or
	// bootstrapURL.
	BootstrapPort int `json:"bootstrapPort"`
	// EngineTTL is how long a bootstrap server's response is used. Keep it shorter than the time that an engine takes
	// to start: D hangs on the id of an engine that it once knew and that is gone.
	EngineTTL *config.Duration `json:"engineTTL"`
	// Dispatch is together (default), or serial: P, then D. Serial takes longer by D's queue, and D asks P only for
	// what P has, so that no failed request holds a task of P.
	Dispatch string `json:"dispatch"`
	// AbortTimeout becomes VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long P keeps blocks that nobody has read, and how
	// long P waits for a prompt that D asks for. It must be longer than the longest prefill. Whole seconds.
	AbortTimeout config.Duration `json:"abortTimeout"`

	NumWorkers int    `json:"num_workers"`
	Protocol   string `json:"mooncake_protocol"` // rdma, tcp …
	DeviceName string `json:"device_name"`
	// host:port of a bootstrap server that runs by itself
	BootstrapServerAddress string `json:"bootstrap_server_address"`
	PrefillSideSWAReplay   bool   `json:"prefill_side_swa_replay"`
}

func (o *Options) check() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	if o.BootstrapPort < 0 || o.BootstrapPort > 65535 {
		fault("bootstrapPort", "is not a port", "1 to 65535")
	}
	if o.EngineTTL != nil && *o.EngineTTL < 0 {
		fault("engineTTL", "is negative", `a duration like "30s"; 0 asks anew for each request`)
	}
	if o.Dispatch != "" && o.Dispatch != dispatchTogether && o.Dispatch != dispatchSerial {
		fault("dispatch", "is not a known value", "together or serial")
	}
	if o.AbortTimeout < 0 || time.Duration(o.AbortTimeout)%time.Second != 0 {
		fault("abortTimeout", "is not a number of whole seconds", `a duration like "60s"`)
	}
	if o.NumWorkers < 0 {
		fault("num_workers", "is negative", "1 or more; the engine's default is 10")
	}
	if o.BootstrapServerAddress != "" {
		if host, port, err := net.SplitHostPort(o.BootstrapServerAddress); err != nil || host == "" || !isPort(port) {
			fault("bootstrap_server_address", "is not HOST:PORT", "the engine takes no scheme here")
		}
	}
	return errors.Join(errs...)
}

func (o *Options) port() int {
	if o.BootstrapPort == 0 {
		return DefaultBootstrapPort
	}
	return o.BootstrapPort
}

func (o *Options) ttl() time.Duration {
	if o.EngineTTL == nil {
		return DefaultEngineTTL
	}
	return time.Duration(*o.EngineTTL)
}

func isPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n > 0 && n < 65536
}
