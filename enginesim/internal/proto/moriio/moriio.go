// SPDX-License-Identifier: Apache-2.0

// Package moriio is vLLM's MoRIIOConnector: P writes, or D reads.
//
// It reads these of Config.Extra: read_mode ("true" or "1"; WRITE otherwise), defer_timeout (seconds, 60), version (of
// vLLM: 0.28, 0.32 or 0.33, the default) and the three of data parallelism: data_parallel_size and
// data_parallel_size_local (1), data_parallel_start_rank (0). The side channel is both handshake_port and notify_port,
// and is that of all ranks.
package moriio

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
	"github.com/pdkit/pdkit/enginesim/internal/python"
)

// moriio is one engine's side, after vLLM 017e9f4 (which version 0.28 stands for), 0.32.0 and 0.33.0,
// kv_connector/v1/moriio, and its toy proxy. See docs/protocols/moriio.md. None of it was recorded.
type moriio struct {
	*proto.Wire
	read     bool
	producer bool
	grouped  bool // block ids are a list for each cache group
	plain    bool // a consumer computes the prompt of a request without params itself
	ranks
}

// ranks are the data-parallel ranks: of the whole engine, of this pod, and the number of this pod's first.
type ranks struct{ size, local, start int }

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	set := h.Settings()
	lease := set.Seconds("defer_timeout", 60)
	local := max(set.Count("data_parallel_size_local", 1), 1)
	of := ranks{max(set.Count("data_parallel_size", local), local), local, set.Count("data_parallel_start_rank", 0)}
	versions := []string{"0.28", "0.32", "0.33"}
	version := slices.Index(versions, h.Extra["version"])
	if h.Extra["version"] == "" {
		version = len(versions) - 1
	} else if version < 0 {
		set.Fail(fmt.Errorf("setting version of Extra is none of %v", versions))
	}
	mode := strings.ToLower(strings.TrimSpace(h.Extra["read_mode"]))
	read := mode == "true" || mode == "1"
	w, err := proto.StartWire(set, proto.Options{Writes: !read, Lease: lease})
	if err != nil {
		return nil, err
	}
	return &moriio{Wire: w, read: read, ranks: of, grouped: version > 0, plain: version > 1 || version > 0 && !read,
		producer: h.Role == proto.RoleProducer}, nil // kv_both counts as a consumer
}

func (c *moriio) Begin(r *core.Generation) core.Transfer {
	return &mori{c: c, request: r, rank: c.start + c.rankFor(r)}
}

// rankFor is the pod's rank that serves a request: the one that the header names, else the pod's last.
func (c *moriio) rankFor(r *core.Generation) int {
	if n, ok := proto.RankOf(r, c.local); ok {
		return n
	}
	return c.local - 1
}

// Rejected tells P to release, where the params say where P is.
func (c *moriio) Rejected(_ context.Context, params core.Params) {
	if to, ok := explicit(params); ok && params.Is("do_remote_prefill") {
		c.letGo(to, params.Text("transfer_id"))
	}
}

// letGo releases by the transfer id: what P offers under it, or in READ mode the request that it names.
func (c *moriio) letGo(to address, id string) {
	port, m := to.notify, proto.RequestMessage{Name: id}
	if c.read {
		port, m = to.handshake, proto.RequestMessage{Request: id}
	}
	c.Briefly(func(ctx context.Context) { c.LetGo(ctx, to.at(port), m) })
}

// address is a peer, with the port that notices of the addressed rank go to.
type address struct {
	host              string
	handshake, notify int
}

func (a address) at(port int) proto.Place { return proto.Place{Host: a.host, Port: strconv.Itoa(port)} }

// explicit reads the peer from the params.
func explicit(params core.Params) (address, bool) {
	var handshake, notify int
	ok := params.Read("remote_handshake_port", &handshake) && params.Read("remote_notify_port", &notify)
	a := address{params.Text("remote_host"), handshake, notify}
	return a.ofRank(params), ok && a.host != "" && handshake != 0 && notify != 0
}

// ofRank finds P's rank: each pod has a host of its own, and its ranks listen for notices one after another. P's params
// name no rank: here D's pod is the one that they call remote_host.
func (a address) ofRank(params core.Params) address {
	var rank, local int
	var hosts []string
	params.Read("remote_dp_rank", &rank)
	params.Read("remote_dp_size_local", &local)
	params.Read("remote_hosts", &hosts)
	if local > 0 && params.Has("remote_dp_rank") {
		if pod := rank / local; pod < len(hosts) {
			a.host = hosts[pod]
		}
		rank %= local
	}
	a.notify += rank
	return a
}

// The patterns by which engines find their peer in a request's id.
var (
	prefillAddress = regexp.MustCompile(`___prefill_addr_(.+?)___decode_addr_`)
	decodeAddress  = regexp.MustCompile(`___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`)
)

// embedded reads the peer from the request's id.
func embedded(id string, producer bool, params core.Params) (address, bool) {
	pattern := prefillAddress
	if producer {
		pattern = decodeAddress
	}
	found := pattern.FindStringSubmatch(id)
	if found == nil {
		return address{}, false
	}
	parts := map[string]string{}
	for part := range strings.SplitSeq(found[1], ",") {
		name, value, _ := strings.Cut(part, ":")
		parts[strings.TrimSpace(name)] = strings.TrimSpace(value)
	}
	handshake, err1 := strconv.Atoi(parts["handshake"])
	notify, err2 := strconv.Atoi(parts["notify"])
	a := address{parts["host"], handshake, notify}
	return a.ofRank(params), err1 == nil && err2 == nil && a.host != ""
}

// mori is one request's side.
type mori struct {
	core.NoTransfer
	c       *moriio
	request *core.Generation
	rank    int // that serves the request, of all of the engine's
	peer    address
}

// External is true for every request of a consumer, but in newer releases only with the flag. WRITE has them since
// 0.32.0, READ since 0.33.0 (moriio_connector.py: get_num_new_matched_tokens).
func (t *mori) External() bool {
	return !t.c.producer && (!t.c.plain || t.request.Params.Is("do_remote_prefill"))
}

// Arrived finds what the scheduler does not survive: keys that it reads without asking, and a peer that is named
// nowhere.
func (t *mori) Arrived(context.Context, *core.Sequence) (string, error) {
	params := t.request.Params
	if len(params) == 0 {
		return "", nil
	}
	if !params.Has("transfer_id") {
		return "", &core.Death{Why: "KeyError: transfer_id"}
	}
	switch {
	case t.c.producer && params.Is("do_remote_decode"):
	case !t.c.producer && params.Is("do_remote_prefill") && (!t.c.read || t.reads()):
	default:
		return "", nil
	}
	if !params.Has("remote_block_ids") || !params.Has("remote_engine_id") {
		return "", &core.Death{Why: "KeyError: remote_block_ids, remote_engine_id"}
	}
	var ok bool
	if t.peer, ok = embedded(t.request.ID, t.c.producer, params); !ok {
		if t.peer, ok = explicit(params); !ok {
			return "", &core.Death{Why: "ValueError: cannot parse the peer's zmq_address from request_id"}
		}
	}
	return "", nil
}

// reads reports whether a consumer in READ mode knows which blocks to read.
func (t *mori) reads() bool {
	return python.Truthy(t.request.Params["remote_block_ids"]) && t.request.Params.Has("remote_engine_id")
}

func (t *mori) Dropped(release bool) {
	if t.c.producer || !release || t.peer.host == "" || !t.request.Params.Is("do_remote_prefill") {
		return
	}
	t.c.letGo(t.peer, t.request.Params.Text("transfer_id"))
}

func (t *mori) Load(ctx context.Context, s *core.Sequence) error {
	err := t.take(ctx, s)
	if _, failed := errors.AsType[*core.LoadError](err); failed { // it is told to nobody: the request stays pending
		err = proto.Hang(ctx)
	}
	if err != nil && !t.c.read {
		t.c.Core.Lose(s) // P might still write into its blocks
	}
	return err
}

func (t *mori) take(ctx context.Context, s *core.Sequence) error {
	params, id := t.request.Params, t.request.Params.Text("transfer_id")
	if t.c.read {
		if !params.Is("do_remote_prefill") || !t.reads() {
			return t.unwritten(s)
		}
		return t.pull(ctx, s, id)
	}
	if !params.Is("do_remote_prefill") || !strings.HasPrefix(id, "tx") || !t.notifies() {
		return proto.Hang(ctx) // nobody was told of the blocks
	}
	if _, err := t.c.Connect(ctx, t.peer.at(t.peer.handshake)); err != nil {
		return err
	}
	return t.c.ReadNamed(ctx, s, t.peer.at(t.peer.notify), id)
}

// notifies reports whether this rank of D tells P about its blocks. Of all ranks that might have the request one must:
// the one that the params call the leader, else the one with P's number, else the first.
func (t *mori) notifies() bool {
	params := t.request.Params
	if params.Given("is_request_leader") {
		return python.Truthy(params["is_request_leader"])
	}
	var owner int
	if python.Truthy(params["remote_dp_rank_override"]) {
		params.Read("remote_dp_rank", &owner)
	}
	return t.rank == owner
}

// unwritten goes on with blocks that nobody has written.
func (t *mori) unwritten(s *core.Sequence) error {
	blank := make([][]byte, len(s.Blocks)-s.Computed/t.c.Core.BlockSize)
	for i := range blank {
		blank[i] = make([]byte, t.c.Core.BlockBytes)
	}
	t.c.Core.Fill(s, blank, s.Prompt)
	t.c.Core.Ledger.ComputedByConsumer(s.ID)
	return nil
}

// pull reads P's blocks by their ids, and releases them by the transfer id.
func (t *mori) pull(ctx context.Context, s *core.Sequence, id string) error {
	ids, ok := t.blockIDs()
	if !ok {
		return &core.Death{Why: "TypeError: remote_block_ids are not of this release's shape"}
	}
	need := len(s.Blocks) - s.Computed/t.c.Core.BlockSize
	if len(ids) < need {
		return &core.Death{Why: "assertion: there are fewer remote blocks than local ones"}
	}
	ids = ids[len(ids)-need:]
	p, err := t.c.Connect(ctx, t.peer.at(t.peer.handshake))
	if err != nil {
		return err
	}
	if err := t.c.Fetch(ctx, p, s, s.Prompt, proto.AskMessage{Request: id, Blocks: ids}); err != nil {
		return err
	}
	if _, err = t.c.Connect(ctx, t.peer.at(t.peer.notify)); err != nil {
		return nil //nolint:nilerr // the notice is lost, the KV is here; P's blocks wait for defer_timeout
	}
	_ = p.Release(ctx, proto.RequestMessage{Request: id})
	return nil
}

// blockIDs reads P's blocks. The model has one cache group.
func (t *mori) blockIDs() (ids []int64, ok bool) {
	var groups [][]int64
	if !t.c.grouped {
		return ids, t.request.Params.Read("remote_block_ids", &ids)
	}
	if !t.request.Params.Read("remote_block_ids", &groups) || len(groups) != 1 {
		return nil, false
	}
	return groups[0], true
}

// Finished hands off what ended by length. It frees anything else at once, even if D waits for it.
func (t *mori) Finished(s *core.Sequence, reason string) any {
	if !t.c.producer || !t.request.Params.Is("do_remote_decode") || reason != core.ReasonLength {
		return nil
	}
	id := t.request.Params.Text("transfer_id")
	prompt := core.KeyOf(s.Tokens[:s.Prompt])
	if t.c.read {
		s.ID = id // from here on P knows the request by its transfer id
	}
	request := s.ID
	blocks := t.c.Core.Pin(s, prompt)
	if !t.c.read && strings.HasPrefix(id, "tx") {
		t.c.Spawn(func() { // P writes once it has found D
			if _, err := t.c.Connect(t.c.Ctx, t.peer.at(t.peer.handshake)); err == nil {
				t.c.Side.Offers.Put(id, request)
			}
		})
	}
	host, port := t.c.Side.Address()
	blocks = blocks[:core.BlocksFor(s.Prompt, t.c.Core.BlockSize)]
	ids := any(blocks)
	if t.c.grouped {
		ids = [][]int32{blocks}
	}
	return python.Object{"do_remote_prefill", true, "do_remote_decode", false, "remote_block_ids", ids,
		"remote_engine_id", host + ":" + strconv.Itoa(port), "remote_host", host, "remote_handshake_port", port,
		"remote_notify_port", port, "remote_dp_rank", t.rank, "remote_dp_rank_override", true,
		"remote_dp_size", t.c.size, "remote_dp_size_local", t.c.local, "tp_size", 1, "transfer_id", id}
}
