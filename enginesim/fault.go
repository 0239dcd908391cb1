// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/server"
)

// FaultKind is what a scripted fault does.
type FaultKind int

// Kinds of faults.
const (
	// FaultStatus answers Status with Header and Body. Without a Body it is an error object as vLLM's.
	FaultStatus = FaultKind(server.EffectStatus)
	// FaultReset breaks the connection (RST) before the response's headers.
	FaultReset = FaultKind(server.EffectReset)
	// FaultResetStream breaks the connection (RST) after the headers and AfterChunks stream events; a response that is
	// not streamed breaks in its body.
	FaultResetStream = FaultKind(server.EffectResetStream)
	// FaultStall never answers, until the client leaves.
	FaultStall = FaultKind(server.EffectStall)
	// FaultStallStream stops after the headers and AfterChunks stream events, until the client leaves. With a Delay the
	// stream goes on after it, as that of an engine whose tool parser holds a call's arguments back until they are
	// whole, or which hides reasoning.
	FaultStallStream = FaultKind(server.EffectStallStream)
	// FaultGarbage answers 200 with Body, by default text that is not JSON.
	FaultGarbage = FaultKind(server.EffectGarbage)
	// FaultRedirect answers 307 to Location.
	FaultRedirect = FaultKind(server.EffectRedirect)
	// FaultOversize answers 200 with Size bytes of JSON.
	FaultOversize = FaultKind(server.EffectOversize)
	// FaultDelay waits for Delay, then serves the request.
	FaultDelay = FaultKind(server.EffectDelay)
	// FaultMutateHandoff serves the request and lets Mutate change the kv_transfer_params of the response.
	FaultMutateHandoff = FaultKind(server.EffectMutateHandoff)
	// FaultLoadFailure makes the load of the KV from the other engine fail.
	FaultLoadFailure = FaultKind(server.EffectLoadFailure)
	// FaultKill kills the engine after the headers and AfterChunks stream events, or, for a response that is not
	// streamed, in place of it.
	FaultKill = FaultKind(server.EffectKill)
	// FaultTerminate is SIGTERM after AfterChunks stream events: the stream ends with finish_reason "abort" and
	// "[DONE]". A response that is not streamed says "abort", without a token.
	FaultTerminate = FaultKind(server.EffectTerminate)
	// FaultDeath makes the engine core die after AfterChunks stream events: an error event, "[DONE]", and the port
	// closes. Not streamed, it is a 500.
	FaultDeath = FaultKind(server.EffectDeath)
	// FaultRefuse closes the port and its connections at once; ClearFaults opens it again. It matches no request.
	FaultRefuse = FaultKind(server.EffectRefuse)
	// FaultCorruptKV serves the request and flips a bit of its KV: in what a prefill leg leaves in memory after its own
	// token is computed, or in what a decode leg got from the other engine. Nothing but the decode's text shows it.
	FaultCorruptKV = FaultKind(server.EffectCorruptKV)
	// FaultSurplus serves the request and sends one response more on its connection, 200 with Body, Delay after its
	// own.
	FaultSurplus = FaultKind(server.EffectSurplus)
	// FaultEnding ends the response, whole or streamed, after AfterChunks tokens of each choice, or with its last,
	// with an ending by which the request's API says that the engine gave up: Ending. The status is 200, the response
	// is well-formed, and a prefill leg has no handoff.
	FaultEnding = FaultKind(server.EffectEnding)
	// FaultHangTransfer lets the transfer of the KV from the other engine never end: the request holds its blocks until
	// its client leaves, and the engine serves all else and is well. With Peer it is one pair that hangs.
	FaultHangTransfer = FaultKind(server.EffectHangTransfer)
)

// String returns the kind's name without Fault, as in ResetStream.
func (k FaultKind) String() string {
	name, ok := map[FaultKind]string{FaultStatus: "Status", FaultReset: "Reset", FaultResetStream: "ResetStream",
		FaultStall: "Stall", FaultStallStream: "StallStream", FaultGarbage: "Garbage", FaultRedirect: "Redirect",
		FaultOversize: "Oversize", FaultDelay: "Delay", FaultMutateHandoff: "MutateHandoff",
		FaultLoadFailure: "LoadFailure", FaultKill: "Kill", FaultTerminate: "Terminate", FaultDeath: "Death",
		FaultRefuse: "Refuse", FaultCorruptKV: "CorruptKV", FaultSurplus: "Surplus",
		FaultEnding: "Ending", FaultHangTransfer: "HangTransfer"}[k]
	if !ok {
		return fmt.Sprintf("FaultKind(%d)", int(k))
	}
	return name
}

// Legs of a request, told by its kv_transfer_params.
const (
	LegPrefill = "prefill" // do_remote_decode
	LegDecode  = "decode"  // do_remote_prefill
	LegPlain   = "plain"   // neither
)

// Fault is a scripted fault. It strikes the next Count requests that match Path and Leg; the first fault that matches
// is the one.
type Fault struct {
	Kind FaultKind
	// Path is the URL path; "" matches every POST path.
	Path string
	// Leg is one of the Leg constants; "" matches all.
	Leg string
	// Count is how many requests are struck: 0 means one, negative all.
	Count int
	// Peer, if it is not "", matches only requests whose handoff names that engine id.
	Peer string
	// Share is the share of the matching requests that are struck, drawn at random; 0: all.
	Share float64

	Status      int
	Header      http.Header
	Body        string
	AfterChunks int
	Delay       time.Duration
	Size        int
	Location    string
	Mutate      func(handoff map[string]any)
	// Ending is a finish_reason, by default "abort". In the Messages API it is a stop_reason, by default "null", which
	// stands for null; in the Responses API a status, by default "cancelled". SGLang's Messages API has "end_turn" for
	// each.
	Ending string
}

var endings = map[string]string{"/v1/messages": "null", "/v1/responses": "cancelled"}

type faultBook struct {
	mu      sync.Mutex
	pending []*Fault
}

func legOf(params core.Params) string {
	switch {
	case params.Is("do_remote_prefill"):
		return LegDecode
	case params.Is("do_remote_decode"):
		return LegPrefill
	}
	return LegPlain
}

// strike takes the fault for a request, if there is one.
func (b *faultBook) strike(path string, body []byte) *server.Effect {
	b.mu.Lock()
	defer b.mu.Unlock()
	leg, peer := "", ""
	for i, f := range b.pending {
		if f.Path != "" && f.Path != path {
			continue
		}
		if f.Leg != "" || f.Peer != "" {
			if leg == "" {
				var r struct {
					Params core.Params `json:"kv_transfer_params"`
				}
				_ = json.Unmarshal(body, &r)
				leg, peer = legOf(r.Params), r.Params.Text("remote_engine_id")
			}
			if f.Leg != "" && f.Leg != leg || f.Peer != "" && f.Peer != peer {
				continue
			}
		}
		if f.Share > 0 && rand.Float64() >= f.Share {
			continue
		}
		if f.Count--; f.Count == 0 {
			b.pending = append(b.pending[:i:i], b.pending[i+1:]...)
		}
		return &server.Effect{
			Kind: server.EffectKind(f.Kind), Status: f.Status, Header: f.Header, Body: f.Body, Size: f.Size,
			AfterChunks: f.AfterChunks, Delay: f.Delay, Location: f.Location, Mutate: f.Mutate,
			Ending: cmp.Or(f.Ending, endings[path], "abort"),
		}
	}
	return nil
}

// Inject scripts a fault.
func (e *Engine) Inject(f Fault) {
	if f.Kind == FaultRefuse {
		e.current().Refuse(true)
		return
	}
	if f.Count == 0 {
		f.Count = 1
	}
	e.faults.mu.Lock()
	defer e.faults.mu.Unlock()
	e.faults.pending = append(e.faults.pending, &f)
}

// ClearFaults forgets all scripted faults that have not struck, and opens a port that FaultRefuse closed.
func (e *Engine) ClearFaults() {
	e.faults.mu.Lock()
	e.faults.pending = nil
	e.faults.mu.Unlock()
	e.current().Refuse(false)
}
