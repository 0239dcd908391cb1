// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// moriio is one engine's side, after vLLM 017e9f4, kv_connector/v1/moriio, and
// protocols of its toy proxy and of llm-d. None of it was recorded.
type moriio struct {
	*wire
	read     bool
	producer bool
}

func startMoRIIO(h *host) (connector, error) {
	set := h.settings()
	lease := set.seconds("defer_timeout", 60)
	if err := set.err(); err != nil {
		return nil, err
	}
	mode := strings.ToLower(strings.TrimSpace(h.extra["read_mode"]))
	read := mode == "true" || mode == "1"
	w, err := startWire(h, wireOptions{writes: !read})
	if err != nil {
		return nil, err
	}
	h.core.setLease(lease)
	return &moriio{wire: w, read: read, producer: h.role == roleProducer}, nil // kv_both counts as a consumer
}

func (c *moriio) begin(r *kvRequest) transfer { return &mori{c: c, request: r} }

// rejected tells P to release, where the params say where P is.
func (c *moriio) rejected(_ context.Context, params kvParams) {
	if to, ok := explicit(params); ok && params.is("do_remote_prefill") {
		c.letGoOf(to, params.text("transfer_id"))
	}
}

// letGoOf releases by the transfer id.
func (c *moriio) letGoOf(to address, id string) {
	if !c.read {
		c.letGo(to.at(to.notify), id)
		return
	}
	ctx, stop := context.WithTimeout(c.ctx, time.Second)
	defer stop()
	if p, err := c.connect(ctx, to.at(to.handshake)); err == nil {
		_ = p.release(ctx, requestMessage{Request: id})
	}
}

// address is a peer, with the port that notices of the addressed rank go to.
type address struct {
	host              string
	handshake, notify int
}

func (a address) at(port int) place { return place{host: a.host, port: strconv.Itoa(port)} }

// explicit reads the peer from the params, which win over the id.
func explicit(params kvParams) (address, bool) {
	var handshake, notify int
	err := errors.Join(json.Unmarshal(orNull(params["remote_handshake_port"]), &handshake), json.Unmarshal(orNull(params["remote_notify_port"]), &notify))
	a := address{params.text("remote_host"), handshake, notify + rankOf(params)}
	return a, err == nil && a.host != "" && handshake != 0 && notify != 0
}

func orNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}

// rankOf shifts the port of notices: the peer's ranks listen one after another.
func rankOf(params kvParams) int {
	var rank int
	_ = json.Unmarshal(orNull(params["remote_dp_rank"]), &rank)
	return rank
}

// The patterns by which engines find their peer in a request's id.
var (
	prefillAddress = regexp.MustCompile(`___prefill_addr_(.+?)___decode_addr_`)
	decodeAddress  = regexp.MustCompile(`___decode_addr_(.+)_[0-9a-f]{32}(?:-.*)?$`)
)

// embedded reads the peer from the request's id.
func embedded(id string, producer bool, params kvParams) (address, bool) {
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
	return address{parts["host"], handshake, notify + rankOf(params)}, errors.Join(err1, err2) == nil && parts["host"] != ""
}

// mori is one request's side.
type mori struct {
	noTransfer
	c       *moriio
	request *kvRequest
	peer    address
}

// external is true for every request of a consumer, with params or without.
func (t *mori) external() bool { return !t.c.producer }

// arrived finds what the scheduler does not survive: keys that it reads without
// asking, and a peer that is named nowhere.
func (t *mori) arrived(context.Context, *sequence) (string, error) {
	params := t.request.params
	if len(params) == 0 {
		return "", nil
	}
	if !params.has("transfer_id") {
		return "", &engineDeath{"KeyError: transfer_id"}
	}
	switch {
	case t.c.producer && params.is("do_remote_decode"):
	case !t.c.producer && params.is("do_remote_prefill") && (!t.c.read || t.reads()):
	default:
		return "", nil
	}
	if !params.has("remote_block_ids") || !params.has("remote_engine_id") {
		return "", &engineDeath{"KeyError: remote_block_ids, remote_engine_id"}
	}
	var ok bool
	if t.peer, ok = explicit(params); !ok {
		if t.peer, ok = embedded(t.request.id, t.c.producer, params); !ok {
			return "", &engineDeath{"ValueError: cannot parse the peer's zmq_address from request_id"}
		}
	}
	return "", nil
}

// reads says whether a consumer in READ mode has something to read by.
func (t *mori) reads() bool {
	return truthy(t.request.params["remote_block_ids"]) && t.request.params.has("remote_engine_id")
}

func (t *mori) dropped(release bool) {
	if t.c.producer || !release || t.c.silenced() || t.peer.host == "" || !t.request.params.is("do_remote_prefill") {
		return
	}
	t.c.letGoOf(t.peer, t.request.params.text("transfer_id"))
}

func (t *mori) load(ctx context.Context, s *sequence) error {
	err := t.take(ctx, s)
	if _, failed := errors.AsType[*loadError](err); failed { // it is told to nobody: the request stays pending
		<-ctx.Done()
		err = context.Cause(ctx)
	}
	if err != nil && !t.c.read {
		t.c.core.lose(s) // P might still write into its blocks
	}
	return err
}

func (t *mori) take(ctx context.Context, s *sequence) error {
	params, id := t.request.params, t.request.params.text("transfer_id")
	if t.c.read {
		if !params.is("do_remote_prefill") || !t.reads() {
			return t.unwritten(s)
		}
		return t.pull(ctx, s, id)
	}
	if !params.is("do_remote_prefill") || !strings.HasPrefix(id, "tx") {
		<-ctx.Done() // nobody was told of the blocks
		return context.Cause(ctx)
	}
	if _, err := t.c.connect(ctx, t.peer.at(t.peer.handshake)); err != nil {
		return err
	}
	return t.c.readNamed(ctx, s, t.peer.at(t.peer.notify), id)
}

// unwritten goes on with whatever lies in the blocks.
func (t *mori) unwritten(s *sequence) error {
	blank := make([][]byte, len(s.blocks)-s.computed/t.c.core.blockSize)
	for i := range blank {
		blank[i] = make([]byte, t.c.core.blockBytes)
	}
	t.c.core.fill(s, blank, s.prompt)
	t.c.host.core.ledger.computedByConsumer(s.id)
	return nil
}

// pull reads P's blocks by their ids, and releases them by the transfer id.
func (t *mori) pull(ctx context.Context, s *sequence, id string) error {
	var ids []int64
	need := len(s.blocks) - s.computed/t.c.core.blockSize
	if json.Unmarshal(t.request.params["remote_block_ids"], &ids) != nil || len(ids) < need {
		return &engineDeath{"assertion: there are fewer remote blocks than local ones"}
	}
	ids = ids[len(ids)-need:]
	p, err := t.c.connect(ctx, t.peer.at(t.peer.handshake))
	if err != nil {
		return err
	}
	if err := t.c.fetch(ctx, p, s, s.prompt, askMessage{Request: id, Blocks: ids}); err != nil {
		return err
	}
	if _, err = t.c.connect(ctx, t.peer.at(t.peer.notify)); err != nil {
		return nil //nolint:nilerr // the notice is lost, the KV is here; P's blocks wait for defer_timeout
	}
	_ = p.release(ctx, requestMessage{Request: id})
	return nil
}

// moriHandoff is what P answers.
type moriHandoff struct {
	DoRemotePrefill bool    `json:"do_remote_prefill"`
	DoRemoteDecode  bool    `json:"do_remote_decode"`
	BlockIDs        []int32 `json:"remote_block_ids"`
	EngineID        string  `json:"remote_engine_id"`
	Host            string  `json:"remote_host"`
	HandshakePort   int     `json:"remote_handshake_port"`
	NotifyPort      int     `json:"remote_notify_port"`
	DPRank          int     `json:"remote_dp_rank"`
	DPRankOverride  bool    `json:"remote_dp_rank_override"`
	DPSize          int     `json:"remote_dp_size"`
	DPSizeLocal     int     `json:"remote_dp_size_local"`
	TPSize          int     `json:"tp_size"`
	TransferID      string  `json:"transfer_id"`
}

// finished hands off what ended by length; anything else is freed at once, whoever
// waits for it.
func (t *mori) finished(s *sequence, reason string) any {
	if !t.c.producer || !t.request.params.is("do_remote_decode") || reason != reasonLength {
		return nil
	}
	id := t.request.params.text("transfer_id")
	prompt := KeyOf(s.tokens[:s.prompt])
	if t.c.read {
		s.id = id // from here on P knows the request by its transfer id
	}
	request := s.id
	blocks := t.c.core.pin(s, prompt)
	if !t.c.read && strings.HasPrefix(id, "tx") {
		t.c.spawn(func() { // P writes once it has found D
			if _, err := t.c.connect(t.c.ctx, t.peer.at(t.peer.handshake)); err == nil {
				t.c.side.offers.put(id, request)
			}
		})
	}
	host, port := t.c.side.address()
	return &moriHandoff{
		DoRemotePrefill: true, BlockIDs: blocks[:blocksFor(s.prompt, t.c.core.blockSize)], EngineID: host + ":" + strconv.Itoa(port),
		Host: host, HandshakePort: port, NotifyPort: port, DPRankOverride: true, DPSize: 1, DPSizeLocal: 1, TPSize: 1, TransferID: id,
	}
}
