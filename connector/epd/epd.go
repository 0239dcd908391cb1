// SPDX-License-Identifier: Apache-2.0

// Package epd adds an encode stage before the legs of another connector: encode, prefill, decode. The media of a chat are encoded by
// engines of their own (vLLM with ec_role ec_producer), and P takes the embeddings over instead of computing them.
//
// Each distinct media item of a /v1/chat/completions request (image_url, audio_url, video_url, input_audio) becomes a chat request with
// that item alone, to an encode engine. The engine's answer tells in ec_transfer_params what it has encoded, and those of all items are
// merged into the prefill leg. The media stay in both legs: an embedding that P cannot get, it computes itself, and both legs render
// the same prompt. D needs no embedding, since all of its prompt comes from P. One failed item fails the request; requests without
// media skip the stage.
//
// Items carry no uuid of pdkit's. Engines know media by their content, on both sides alike; a uuid that stands for an address would
// give yesterday's picture for it, and one that clients can work out would let them put a picture of theirs in another's place. A
// uuid of the client's stays in all legs.
//
// Facts: vLLM 0.32.0's OpenAPI document; vllm/distributed/ec_transfer, docs/features/ec_cpu_connector.md and
// examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py (its --no-rewrite). No engine of this kind was run.
package epd

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/config"
)

// The types of encode stage.
const (
	Example = "example" // ECExampleConnector: a shared folder, in which P finds embeddings by themselves
	NIXL    = "nixl"    // ECCPUConnector with ec_enable_nixl: P reads them out of the encode engine's memory, at the address in ec_transfer_params
)

// Types returns the known types.
func Types() []string { return []string{Example, NIXL} }

// DefaultMaxItems is how many media items of one request are encoded before the legs.
const DefaultMaxItems = 128

// Options are the stage's settings.
type Options struct {
	Type string `json:"type"` // example or nixl
	// MaxItems bounds the media items of one request. A request with more is one that the pair cannot carry: it goes by the flow's policy to
	// one engine, or is refused. 0 is [DefaultMaxItems].
	MaxItems int `json:"maxItems"`
	// SharedStoragePath is the folder of type example, as the engines see it; rendered for them.
	SharedStoragePath string `json:"sharedStoragePath"`
	// CPUBytes is each engine's memory for embeddings, of type nixl; rendered for them. 0 is 1 GiB.
	CPUBytes int64 `json:"cpuBytes"`
}

// Wrap puts an encode stage before a connector's legs. All abilities of the connector stay visible.
func Wrap(inner connector.KVConnector, o *Options) (connector.KVConnector, error) {
	if inner == nil {
		return nil, errors.New("epd: Wrap needs a connector")
	}
	if o == nil {
		o = &Options{}
	}
	var errs []error
	fault := func(path, problem, remedy string) {
		errs = append(errs, &config.FieldError{Path: path, Problem: problem, Remedy: remedy})
	}
	switch o.Type {
	case "":
		fault("type", "is missing", "write example or nixl")
	case Example, NIXL:
	default:
		fault("type", "is not a known encoder", "write example or nixl")
	}
	if o.MaxItems < 0 {
		fault("maxItems", "is negative", "write 0 for the default, or a number of items")
	}
	if o.CPUBytes < 0 {
		fault("cpuBytes", "is negative", "write 0 for the default, or a number of bytes")
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	c := &Connector{KVConnector: inner, opts: *o}
	if c.opts.MaxItems == 0 {
		c.opts.MaxItems = DefaultMaxItems
	}
	return c, nil
}

// Connector is a connector with an encode stage. Make it with [Wrap].
type Connector struct {
	connector.KVConnector
	opts Options
}

// Unwrap returns the connector whose legs follow.
func (c *Connector) Unwrap() connector.KVConnector { return c.KVConnector }

// Items returns a chat's media items, equal ones with equal IDs.
func (c *Connector) Items(s *connector.Session) []connector.Item {
	if s.API != connector.APIChat {
		return nil
	}
	items, _ := mediaOf(s.Request, c.opts.MaxItems)
	return items
}

// CheckRequest has the inner connector's reasons against a request, and one against chats with more media than are
// encoded.
func (c *Connector) CheckRequest(r *connector.Request) error {
	if inner, ok := connector.As[connector.RequestChecker](c.KVConnector); ok {
		if err := inner.CheckRequest(r); err != nil {
			return err
		}
	}
	if r.API == connector.APIChat {
		if _, tooMany := mediaOf(r, c.opts.MaxItems); tooMany {
			return &connector.UnsupportedError{Member: r.API.PromptMember()}
		}
	}
	return nil
}

// shaping are members of the request that have a part in how media are read and encoded, or scheduled.
var shaping = []string{"mm_processor_kwargs", "media_io_kwargs", "priority", "session_id"}

// Encode describes an item's leg: a chat with that item alone. An encode engine samples nothing; the limit is for one that does.
func (*Connector) Encode(s *connector.Session, i connector.Item, leg *connector.Leg) error {
	body := make([]byte, 0, len(i.Part)+256)
	body = append(body, '{')
	for _, name := range append([]string{"model"}, shaping...) {
		if raw, ok := s.Field(name); ok {
			body = append(append(append(append(append(body, '"'), name...), `":`...), raw...), ',')
		}
	}
	body = append(append(append(body, `"messages":[{"role":"user","content":[`...), i.Part...), `]}],"max_tokens":1,"stream":false}`...)
	leg.SetBody(body)
	return nil
}

const paramsMember = "ec_transfer_params"

// kept is where a session keeps the merged parameters.
const kept = "pdkit.epd." + paramsMember

// Merge keeps what the encode engines answered for the prefill leg. The error is [connector.ErrNoTransfer] where an answer cannot be used.
func (c *Connector) Merge(s *connector.Session, answers []json.RawMessage) error {
	merged, err := merge(answers, c.opts.Type == NIXL)
	if err == nil && merged != nil {
		s.SetMetadata(kept, string(merged))
	}
	return err
}

// Traits are the inner connector's, with the member of the encode engines' parameters.
func (c *Connector) Traits() connector.Traits {
	t := c.KVConnector.Traits()
	t.Members = append(slices.Clip(t.Members), paramsMember)
	return t
}

// Prefill is the inner connector's, with the encode engines' parameters.
func (c *Connector) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	if err := c.KVConnector.Prefill(ctx, s, leg); err != nil {
		return err
	}
	if s.API != connector.APIChat {
		return nil
	}
	if merged := s.Metadata()[kept]; merged != "" {
		leg.Set(paramsMember, json.RawMessage(merged))
	}
	return nil
}
