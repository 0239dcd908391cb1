// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/kvevents"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/model"
)

// KV roles, as in vLLM's kv_transfer_config.
const (
	RoleProducer = proto.RoleProducer
	RoleConsumer = proto.RoleConsumer
	RoleBoth     = proto.RoleBoth
)

// Policies for a KV load that fails, as in vLLM's kv_load_failure_policy.
const (
	LoadFailureFail      = "fail"
	LoadFailureRecompute = "recompute"
)

// Config describes one engine. The zero value is a lone engine without a KV connector on a free port of loopback; every
// field has a usable default.
type Config struct {
	// Model is the served model name. Default "tiny".
	Model string
	// Adapters are LoRA adapters that the engine is launched with. /v1/models lists them with Model as their parent.
	// See Engine.LoadAdapter.
	Adapters []string
	// ListedToo are other models that /v1/models lists before this one, with their adapters, as a router does that
	// stands before engines of several models. The engine answers 404 to requests for them.
	ListedToo map[string][]string
	// KeepResponses keeps each response of /v1/responses in memory until the engine ends, unless its request says
	// store: false, as vLLM does with VLLM_ENABLE_RESPONSES_API_STORE=1: for previous_response_id, for
	// GET /v1/responses/ID (stream and starting_after for one in the background), for POST /v1/responses/ID/cancel, and
	// for background. Without it vLLM knows no response by its id, and refuses background.
	KeepResponses bool
	// Connector is the KV connector: "none", "nixl" (pull), or another one of pdkit's connector names. Default "nixl"
	// when KVRole is set, else "none".
	Connector string
	// Extra are settings of the connector's own, by the name that the real engine gives them
	// (kv_connector_extra_config, or an environment variable). The connector's package in internal/proto says which it
	// reads.
	Extra map[string]string
	// KVRole is kv_producer, kv_consumer or kv_both. The engine serves every request in each role, as vLLM does;
	// CheckKV judges by it.
	KVRole string
	// EngineID is the id in handoffs. Default: a random one, new at each Restart.
	EngineID string

	// BlockSize is tokens per KV block. Default 32.
	BlockSize int
	// Blocks is the capacity in blocks. Default 4096.
	Blocks int
	// BytesPerToken is the KV of one token, a multiple of 8. Default 16.
	BytesPerToken int
	// MaxModelLen bounds prompt and response together, in tokens. Default 32768, or what the blocks hold if that is
	// less.
	MaxModelLen int
	// MaxRunning bounds requests in execution; others wait. Default 256.
	MaxRunning int
	// DefaultMaxTokens is the response's length when a chat or responses request names none. vLLM then fills the
	// context; the toy model never ends by itself, so the default here is 256.
	DefaultMaxTokens int
	// StreamParams gives the chunks of chats and completions a kv_transfer_params, which is not null in the last one
	// with a token if the connector has something to say. vLLM does so from 0.33.0 on.
	StreamParams bool
	// Seed is the model's. Engines that share KV must have the same seed.
	Seed uint64

	// Lease is how long a handoff pins its blocks (vLLM's kv_lease_duration). Default 30 s.
	Lease time.Duration
	// LoadFailure is "fail" (default) or "recompute".
	LoadFailure string
	// HandshakeTimeout bounds the first contact with another engine. Default 5 s.
	HandshakeTimeout time.Duration

	// PrefillRate is prompt tokens computed per second; 0 is instant. A token that comes from a cache or from another
	// engine costs nothing.
	PrefillRate float64
	// ITL is the time between two tokens of a response; 0 is none.
	ITL time.Duration
	// Timing lets requests take the time that a modelled engine takes, in place of PrefillRate and ITL: steps with a
	// budget of tokens, prompts in chunks between the tokens of others. The engine's own blocks, cache and preemption
	// decide what is computed; where Blocks, BlockSize and MaxRunning are zero, they are those of Timing.
	Timing *model.Spec
	// Link is how KV comes from other engines, with Timing: what one engine fetches queues, and a token has
	// Timing.BytesPerToken.
	Link model.Link

	// Listen is the HTTP address, SideChannel that of the KV side channel. Default "127.0.0.1:0" for both. Restart uses
	// the ports again.
	Listen, SideChannel string
	// APIKey is what requests must have as Authorization: Bearer, as the engines' --api-key has it: below /v1, /v2,
	// /inference and /cohere, as vLLM 0.32.0 guards them; with the connector "sglang" everywhere but below /health,
	// /ready and /metrics. Others get 401. "": none.
	APIKey string
	// APIServers is how many processes accept connections at Listen, as vLLM's --api-server-count has it: each
	// connection belongs to one of them, and Request.Process tells which got a request. They share one engine. Default
	// 1.
	APIServers int
	// KeepAlive is how long an idle HTTP connection stays open. Default 5 s, as uvicorn has it.
	KeepAlive time.Duration
	// ExitDelay is how long a dead engine still answers 503 and 500 before its port closes. Default 50 ms.
	ExitDelay time.Duration
	// KeepRequests bounds Requests. Default 1024; negative keeps none.
	KeepRequests int

	// KVEvents publishes which blocks the prefix cache holds, as vLLM does with --kv-events-config. nil publishes
	// nothing.
	KVEvents *KVEvents
}

// KVEvents is how an engine publishes KV-cache events: three frames a batch (topic, sequence number, msgpack) from a
// ZeroMQ PUB socket, and past batches from a ROUTER. The events are vLLM's BlockStored and BlockRemoved, as maps, with
// integer hashes that are no vLLM's. GET /kv_event_sources says where they are.
type KVEvents struct {
	// Endpoint is the address of the PUB socket, HOST:PORT. Default "127.0.0.1:0". Restart uses the port again.
	Endpoint string
	// Connect makes the PUB socket connect to Endpoint, where a reader must have bound a SUB socket.
	Connect bool
	// Replay is the address of the ROUTER, HOST:PORT. Default "127.0.0.1:0"; "none" offers no replay. Restart uses the
	// port again.
	Replay string
	// Topic is the first frame of each message. Default "".
	Topic string
	// BufferSteps is how many batches a replay has. Default 10000.
	BufferSteps int
	// Queue is how many messages may wait for a slow subscriber; those above are dropped, as ZeroMQ does it at its
	// high-water mark. Default 100000.
	Queue int
	// Rank is the data-parallel rank. Default 0.
	Rank int
	// Arrays sends events as arrays, as vLLM did before vllm-project/vllm#42892.
	Arrays bool
	// OldReplay leaves the topic frame out of a replay, as vLLM did before vllm-project/vllm#45177.
	OldReplay bool
}

// publisher starts the publisher, nil without one.
func (c *Config) publisher() (*kvevents.Publisher, error) {
	e := c.KVEvents
	if e == nil {
		return nil, nil //nolint:nilnil // there is none, and that is no fault
	}
	replay := e.Replay
	if replay == "none" {
		replay = ""
	}
	p, err := kvevents.Start(kvevents.Config{Endpoint: e.Endpoint, Replay: replay, Connect: e.Connect, Topic: e.Topic,
		Steps: e.BufferSteps, Queue: e.Queue, Arrays: e.Arrays, OldReplay: e.OldReplay, Rank: e.Rank,
		BlockSize: c.BlockSize})
	if err != nil {
		return nil, fmt.Errorf("enginesim: KVEvents: %w", err)
	}
	return p, nil
}

func (c Config) kept() *api.Kept {
	if c.KeepResponses {
		return api.NewKept()
	}
	return nil
}

// core is what the engine core needs of the configuration.
func (c Config) core() core.Config {
	alone := c.Connector == connectorNone
	return core.Config{
		Seed: c.Seed, Blocks: c.Blocks, BlockSize: c.BlockSize, BytesPerToken: c.BytesPerToken,
		MaxRunning: c.MaxRunning, Lease: c.Lease,
		PrefillRate: c.PrefillRate, ITL: c.ITL, Timing: c.Timing, Link: c.Link,
		Recompute: c.LoadFailure == LoadFailureRecompute, Alone: alone,
		MustLoad: c.KVRole == RoleConsumer && !alone,
	}
}

func (c Config) withDefaults() (Config, error) {
	setDefault(&c.Model, "tiny")
	if c.Connector == "" {
		c.Connector = connectorNone
		if c.KVRole != "" {
			c.Connector = connectorNIXL
		}
	}
	setDefault(&c.KVRole, RoleBoth)
	if c.Timing != nil {
		setDefault(&c.Blocks, c.Timing.Blocks)
		setDefault(&c.BlockSize, c.Timing.BlockSize)
		setDefault(&c.MaxRunning, c.Timing.MaxRunning)
	}
	setDefault(&c.BlockSize, 32)
	setDefault(&c.Blocks, 4096)
	setDefault(&c.BytesPerToken, 16)
	setDefault(&c.MaxRunning, 256)
	setDefault(&c.DefaultMaxTokens, 256)
	setDefault(&c.Lease, 30*time.Second)
	setDefault(&c.LoadFailure, LoadFailureFail)
	setDefault(&c.HandshakeTimeout, 5*time.Second)
	setDefault(&c.Listen, "127.0.0.1:0")
	setDefault(&c.SideChannel, "127.0.0.1:0")
	setDefault(&c.KeepAlive, 5*time.Second)
	setDefault(&c.ExitDelay, 50*time.Millisecond)
	setDefault(&c.KeepRequests, 1024)
	if c.KVEvents != nil {
		e := *c.KVEvents
		setDefault(&e.Endpoint, "127.0.0.1:0")
		setDefault(&e.Replay, "127.0.0.1:0")
		setDefault(&e.BufferSteps, 10_000)
		setDefault(&e.Queue, 100_000)
		c.KVEvents = &e
	}
	if c.BlockSize > 0 && c.Blocks > 0 {
		setDefault(&c.MaxModelLen, min(32768, c.BlockSize*c.Blocks))
	}
	return c, c.validate()
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c Config) validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("enginesim: "+format, args...)) }
	if known := starters(); known[c.Connector] == nil {
		bad("unknown Connector %q: want one of %s", c.Connector, strings.Join(slices.Sorted(maps.Keys(known)), ", "))
	}
	switch c.KVRole {
	case RoleProducer, RoleConsumer, RoleBoth:
	default:
		bad("unknown KVRole %q: want %s, %s or %s", c.KVRole, RoleProducer, RoleConsumer, RoleBoth)
	}
	if c.LoadFailure != LoadFailureFail && c.LoadFailure != LoadFailureRecompute {
		bad("unknown LoadFailure %q: want %s or %s", c.LoadFailure, LoadFailureFail, LoadFailureRecompute)
	}
	if c.BlockSize < 1 || c.Blocks < 1 || c.MaxRunning < 1 || c.MaxModelLen < 2 || c.DefaultMaxTokens < 1 {
		bad("BlockSize, Blocks, MaxRunning, MaxModelLen and DefaultMaxTokens must be positive")
	} else if c.MaxModelLen > c.Blocks*c.BlockSize {
		bad("MaxModelLen %d does not fit %d blocks of %d tokens", c.MaxModelLen, c.Blocks, c.BlockSize)
	}
	if c.BytesPerToken < 8 || c.BytesPerToken%8 != 0 {
		bad("BytesPerToken %d: want a multiple of 8", c.BytesPerToken)
	}
	if c.BlockSize > 0 && c.BytesPerToken > core.MaxFrame/c.BlockSize {
		bad("BlockSize times BytesPerToken is more than the %d bytes of a frame", core.MaxFrame)
	}
	if c.Timing != nil {
		if err := c.Timing.Validate(); err != nil {
			errs = append(errs, err)
		}
		if c.PrefillRate != 0 || c.ITL != 0 {
			bad("Timing takes the place of PrefillRate and ITL")
		}
	}
	if c.Link.Latency < 0 || c.Link.BytesPerSecond < 0 {
		bad("a Link's numbers must not be negative")
	}
	if c.PrefillRate < 0 || c.ITL < 0 || c.Lease < 0 || c.HandshakeTimeout < 0 || c.KeepAlive < 0 || c.ExitDelay < 0 {
		bad("durations and rates must not be negative")
	}
	if e := c.KVEvents; e != nil && (e.BufferSteps < 1 || e.Queue < 1 || e.Rank < 0) {
		bad("KVEvents: BufferSteps and Queue must be positive, and Rank not negative")
	}
	return errors.Join(errs...)
}
