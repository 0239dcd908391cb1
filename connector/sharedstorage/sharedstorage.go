// SPDX-License-Identifier: Apache-2.0

// Package sharedstorage is the connector "sharedstorage": vLLM's ExampleConnector, called SharedStorageConnector before
// vLLM 0.13.
//
// P writes a prompt's KV into a folder that both engines see. D finds it there by the prompt's tokens. The requests say
// nothing about it: P runs first, and D gets the client's own request. D finds only a whole prompt, cut to a multiple
// of the block size of one token less. So D always computes a prompt of about one block itself.
//
// With cacheHitThreshold the flow asks D first, with the member cache_hit_threshold. If D holds a smaller share of the
// prompt than that, it ends with finish_reason "cache_threshold" and without a token. P and then D follow, both with
// the threshold 0. That needs engines with the change vllm-project/vllm#24520 (of RFC #24256, not merged): others
// ignore the member, and D then serves every request alone.
//
// A prompt of one token ends the process of any engine with this connector, P or D (vLLM 0.32.0,
// docs/protocols/sharedstorage.md, recording 11). If a request shows that its prompt has one token,
// [Connector.CheckRequest] refuses it.
//
// Facts: vLLM 0.32.0, recorded exchanges (testdata/golden) and kv_connector/v1/example_connector.py; llm-d-router's
// connector_shared_storage.go for the threshold.
package sharedstorage

import (
	"bytes"
	"context"
	"encoding/json"
	"strconv"

	"github.com/tidwall/gjson"

	"github.com/pdkit/pdkit/config"
	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/attr"
)

// Name is the name the connector is registered under.
const Name = "sharedstorage"

func init() {
	connector.Register(Name, func(raw json.RawMessage) (connector.KVConnector, error) {
		var o Options
		if err := config.Decode(raw, &o); err != nil {
			return nil, err
		}
		return New(&o)
	}, "ExampleConnector", "SharedStorageConnector")
}

// Options are the connector's settings.
type Options struct {
	// CacheHitThreshold, 0 to 1, is the share of the prompt that D must hold to serve a request without a prefill. With
	// nil P always runs first.
	CacheHitThreshold *float64 `json:"cacheHitThreshold"`
	// SharedStoragePath is the folder, as the engines see it. It is rendered for them. The engines' default is /tmp.
	SharedStoragePath string `json:"sharedStoragePath"`
	// EngineStoragePath is the same setting under the engine's own name.
	EngineStoragePath string `json:"shared_storage_path"`
}

// Connector is the connector "sharedstorage". The zero value is ready.
type Connector struct {
	path      string
	threshold json.RawMessage // nil: P always runs first
}

// New checks the settings. nil means defaults.
func New(o *Options) (*Connector, error) {
	if o == nil {
		o = &Options{}
	}
	c := &Connector{path: o.SharedStoragePath}
	if c.path == "" {
		c.path = o.EngineStoragePath
	} else if o.EngineStoragePath != "" {
		return nil, &config.FieldError{Path: "shared_storage_path",
			Problem: "is given besides sharedStoragePath, which means the same", Remedy: "keep one of the two"}
	}
	if t := o.CacheHitThreshold; t != nil {
		if !(*t >= 0 && *t <= 1) {
			return nil, &config.FieldError{Path: "cacheHitThreshold", Problem: "is not a share",
				Remedy: "write a number from 0 to 1, as 0.8"}
		}
		c.threshold = strconv.AppendFloat(nil, *t, 'g', -1, 64)
	}
	return c, nil
}

// Traits declares the protocol. D finds the KV by the prompt's tokens alone if both engines use one folder; the
// requests do not depend on the order. Reading does not remove KV, so several choices for one prompt work. With a
// threshold D is asked first, and only in the APIs whose engines know cache_hit_threshold (in #24520, chat and
// completions).
func (c *Connector) Traits() connector.Traits {
	t := connector.Traits{
		Name:    Name,
		Handoff: connector.Handoff{MultiUse: true, ContentStore: true},

		Serving:   connector.Serving{ReusedInUsage: true},
		PairRules: []attr.PairRule{attr.Shared(attr.Store)},
	}
	if c.threshold != nil {
		t.Order, t.OtherOrders = connector.DecodeFirst, []connector.Order{connector.PrefillThenDecode}
		t.Members = []string{thresholdMember}
		t.APIs = []connector.API{connector.APIChat, connector.APICompletions}
	}
	return t
}

const thresholdMember = "cache_hit_threshold"

var zero = json.RawMessage("0")

// Prefill asks P for one token. P must compute the prompt even if little of it is in the folder, so its threshold is 0.
func (c *Connector) Prefill(_ context.Context, _ *connector.Session, leg *connector.Leg) error {
	if err := c.CheckRequest(leg.Request()); err != nil {
		return err
	}
	if _, asked := leg.Current(thresholdMember); asked || c.threshold != nil {
		leg.Set(thresholdMember, zero)
	}
	return nil
}

// Decode sends the client's own request. With a threshold it sets the member: to the threshold before P ran, and to 0
// after.
func (c *Connector) Decode(_ context.Context, _ *connector.Session, p *connector.PrefillResult,
	leg *connector.Leg) error {
	switch {
	case c.threshold == nil:
	case p == nil:
		leg.Set(thresholdMember, c.threshold)
	default:
		leg.Set(thresholdMember, zero)
	}
	return nil
}

var coldReason = []byte(`cache_threshold`)

// Cold recognizes D's refusal: a response with status 200, whole or streamed, whose choice ended by cache_threshold.
func (*Connector) Cold(_ *connector.Session, status int, head []byte) bool {
	if status != 200 || !bytes.Contains(head, coldReason) { // most responses end here, without parsing
		return false
	}
	return gjson.GetBytes(head, "choices.0.finish_reason").Str == string(coldReason)
}
