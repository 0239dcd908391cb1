// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"encoding/json"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/handoff"
)

// Options are the settings of the connector "relay".
type Options struct {
	// Member is the member of the body in which P's response names its KV and D's request gets it, with dots between
	// nested names. Default kv_transfer_params.
	Member string `json:"member"`
	// Header is the header in which P's response names its KV. D gets it in the same header, or in Member if that is
	// given too.
	Header string `json:"header"`
	// Required are the keys without which D must not get P's object, each with the kind of its value: string, integer,
	// list, object, or flag, which must be true. Strings, lists and objects must not be empty.
	Required map[string]string `json:"required"`
	// Prefill is the object that P's request gets in Member, as {"do_remote_decode": true}. Default: none.
	Prefill json.RawMessage `json:"prefill"`
	// PassEmpty gives D an empty object too: P says so that there is nothing to transfer. Otherwise the attempt fails.
	PassEmpty bool `json:"passEmpty"`
	// EndsByLength is for a P that names its KV only if it ends by length: the prefill leg masks the end of sequence.
	EndsByLength bool `json:"endsByLength"`
	// LeaseDuration is how long P keeps KV that nobody has read. Default 0: it does not age.
	LeaseDuration *config.Duration `json:"leaseDuration"`

	// KVConnector, ModulePath and Extra are the engines' own settings, under the engines' names. They are rendered and
	// do not change the legs.
	KVConnector string         `json:"kv_connector"`
	ModulePath  string         `json:"kv_connector_module_path"`
	Extra       map[string]any `json:"kv_connector_extra_config"`
}

func (o *Options) member() string {
	if o.Member == "" {
		return connector.ParamsMember
	}
	return o.Member
}

const (
	maxDepth    = 8
	maxRequired = 64
	maxName     = 128
)

var (
	memberName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]*$`)
	headerName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9-]*$`)
)

// clients are the members that mean something in a client's request: what is relayed must not replace them.
var clients = []string{
	"model", "prompt", "messages", "input", "text", "token_ids", "input_ids", "prompt_embeds", "stream",
	"stream_options",
	"max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "n", "best_of", "stop", "stop_token_ids",
	"temperature", "top_p", "seed", "tools", "tool_choice", "response_format", "system", "instructions", "logprobs",
	"echo", "sampling_params", "vllm_xargs", "extra_args", "request_id", "user", "cache_salt", "priority",
}

// headers are those that the flow or the transport sets, and those of clients that engines get.
var headers = []string{
	"accept", "accept-encoding", "authorization", "connection", "content-encoding", "content-length", "content-type",
	"cookie", "expect", "host", "keep-alive", "proxy-authorization", "set-cookie", "te", "traceparent", "tracestate",
	"trailer", "transfer-encoding", "upgrade", "user-agent", "x-request-id", "x-session-id", "x-vllm-priority",
	"x-data-parallel-rank",
}

// fault returns what is wrong with the settings.
func (o *Options) fault() error {
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	path := strings.Split(o.member(), ".")
	switch {
	case len(path) > maxDepth || len(o.Member) > maxName || slices.ContainsFunc(path, notMember):
		fault("member", "is not a member's name", "letters, digits, _ and -, with dots between nested names")
	case len(path) == 1 && slices.Contains(clients, path[0]):
		fault("member", "is a member that clients use", "name the member that carries the engines' parameters alone")
	}
	switch name := strings.ToLower(o.Header); {
	case name == "":
	case len(name) > maxName || !headerName.MatchString(name):
		fault("header", "is not a header's name", "letters, digits and -, as X-KV-Ticket")
	case slices.Contains(headers, name):
		fault("header", "is a header with another meaning",
			"name the header that carries the engines' parameters alone")
	}
	if len(o.Required) > maxRequired {
		fault("required", "has too many keys", "at most "+strconv.Itoa(maxRequired))
	}
	for key, kind := range o.Required {
		if at := config.FieldPath("required", key); key == "" || len(key) > maxName {
			fault(at, "is not a key", "name a key of P's object")
		} else if kinds[kind] == nil {
			fault(at, "is not a known kind", "string, integer, list, object or flag")
		}
	}
	if o.Header != "" {
		for _, given := range []struct {
			path string
			set  bool
		}{{"required", len(o.Required) > 0}, {"passEmpty", o.PassEmpty}} {
			if given.set {
				fault(given.path, "is about an object, but P's parameters are in a header", "remove it, or header")
			}
		}
		if o.Prefill != nil && o.Member == "" {
			fault("prefill", "has no member to stand in", "name member, too")
		}
	}
	if o.Prefill != nil {
		if raw := handoff.Read(o.Prefill); raw.Close() != nil {
			fault("prefill", "is not a well-formed object", `an object, as {do_remote_decode: true}`)
		}
	}
	if o.LeaseDuration != nil && *o.LeaseDuration <= 0 {
		fault("leaseDuration", "is not above 0", `a duration like "30s", or leave it out`)
	}
	if o.KVConnector == "" {
		for path, given := range map[string]bool{"kv_connector_module_path": o.ModulePath != "",
			"kv_connector_extra_config": o.Extra != nil} {
			if given {
				fault(path, "is given without kv_connector", "write the engines' class name in kv_connector")
			}
		}
	}
	return errors.Join(errs...)
}

func notMember(name string) bool { return !memberName.MatchString(name) }
