// SPDX-License-Identifier: Apache-2.0

// Package epd adds an encode stage before the legs of another connector: encode, prefill, decode. Separate engines
// (vLLM with ec_role ec_producer) encode the media of a chat, and P takes their embeddings instead of computing them.
//
// For each distinct media item of a /v1/chat/completions request (image_url, audio_url, video_url, input_audio) the
// flow sends a chat request with only that item to an encode engine. The response says in ec_transfer_params what the
// engine has encoded, and the prefill leg carries the merged parameters of all items. The media stay in both legs,
// since P computes an embedding itself if it cannot get it, and since both legs must render the same prompt. D needs no
// embedding, since its whole prompt comes from P. If one item fails, the request fails. Requests without media skip the
// stage.
//
// pdkit gives the items no uuid. Engines identify media by their content, in the same way on both sides. A uuid made
// from an address would give an old picture if the address has a new one. With a uuid that clients can compute, one
// client could replace another's picture. A client's own uuid stays in all legs.
//
// Facts: vLLM 0.32.0's OpenAPI document; vllm/distributed/ec_transfer, docs/features/ec_cpu_connector.md and
// examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py (its --no-rewrite). Type example is proven with
// engines of vLLM 0.32.0 (lab/engines/prove.sh -encode), type nixl is not.
package epd

import (
	"context"
	"encoding/json"
	"errors"
	"slices"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
)

// The types of encode stage.
const (
	// Example is ECExampleConnector: a shared folder, in which P finds the embeddings without parameters.
	Example = "example"
	// NIXL is ECCPUConnector with ec_enable_nixl: P reads the embeddings from the encode engine's memory, whose address
	// is in ec_transfer_params.
	NIXL = "nixl"
)

// Types returns the known types.
func Types() []string { return []string{Example, NIXL} }

// DefaultMaxItems is the default of [Options.MaxItems].
const DefaultMaxItems = 128

// Options are the stage's settings.
type Options struct {
	Type string `json:"type"` // example or nixl
	// MaxItems bounds the media items of one request. A request with more is one that the pair cannot serve: by the
	// flow's policy it goes to one engine or is refused. 0 is [DefaultMaxItems].
	MaxItems int `json:"maxItems"`
	// SharedStoragePath is the folder of type example, as the engines see it. It is rendered for them.
	SharedStoragePath string `json:"sharedStoragePath"`
	// CPUBytes is each engine's memory for embeddings of type nixl. It is rendered for them. 0 is 1 GiB.
	CPUBytes int64 `json:"cpuBytes"`
}

// Wrap puts an encode stage before a connector's legs. The result has all abilities of the connector.
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

// Options returns the stage's settings.
func (c *Connector) Options() Options { return c.opts }

// Unwrap returns the connector that makes the other legs.
func (c *Connector) Unwrap() connector.KVConnector { return c.KVConnector }

// Items returns a chat's media items. Equal items have equal IDs.
func (c *Connector) Items(s *connector.Session) []connector.Item {
	if s.API != connector.APIChat {
		return nil
	}
	items, _ := mediaOf(s.Request, c.opts.MaxItems)
	return items
}

// CheckRequest returns the inner connector's reasons against a request, and refuses chats with more media items than
// MaxItems.
func (c *Connector) CheckRequest(r *connector.ClientRequest) error {
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

// shaping are the request's members that change how media are read, encoded or scheduled.
var shaping = []string{"mm_processor_kwargs", "media_io_kwargs", "priority", "session_id"}

// Encode builds an item's leg: a chat with only that item. An encode engine samples nothing, but the limit is there for
// one that does.
func (*Connector) Encode(s *connector.Session, i connector.Item, leg *connector.Leg) error {
	body := make([]byte, 0, len(i.Part)+256)
	body = append(body, '{')
	for _, name := range append([]string{"model"}, shaping...) {
		if raw, ok := s.Field(name); ok {
			body = append(append(append(append(append(body, '"'), name...), `":`...), raw...), ',')
		}
	}
	body = append(append(append(body, `"messages":[{"role":"user","content":[`...), i.Part...),
		`]}],"max_tokens":1,"stream":false}`...)
	leg.SetBody(body)
	return nil
}

const paramsMember = "ec_transfer_params"

// Merge merges the encode engines' responses for the prefill leg. If a response cannot be used, the error is
// [connector.ErrNoTransfer].
func (c *Connector) Merge(s *connector.Session, responses []json.RawMessage) error {
	merged, err := merge(responses, c.opts.Type == NIXL)
	if err == nil && merged != nil {
		s.Encoded = merged
	}
	return err
}

// Traits returns the inner connector's traits, and adds the member that holds the encode engines' parameters.
func (c *Connector) Traits() connector.Traits {
	t := c.KVConnector.Traits()
	t.Members = append(slices.Clip(t.Members), paramsMember)
	return t
}

// Prefill is the inner connector's, and adds the encode engines' parameters.
func (c *Connector) Prefill(ctx context.Context, s *connector.Session, leg *connector.Leg) error {
	if err := c.KVConnector.Prefill(ctx, s, leg); err != nil {
		return err
	}
	if s.API != connector.APIChat {
		return nil
	}
	if s.Encoded != nil {
		leg.Set(paramsMember, s.Encoded)
	}
	return nil
}
