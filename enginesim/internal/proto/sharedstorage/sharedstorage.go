// SPDX-License-Identifier: Apache-2.0

// Package sharedstorage is vLLM's ExampleConnector, which was SharedStorageConnector once.
package sharedstorage

import (
	"context"
	"encoding/json"

	"github.com/pdkit/pdkit/enginesim/internal/core"
	"github.com/pdkit/pdkit/enginesim/internal/proto"
)

// sharedStorage keeps whole prompts in a folder, and finds whole prompts only. It follows
// kv_connector/v1/example_connector.py and docs/protocols/sharedstorage.md: an engine saves the prompt without its last
// token, cut to whole blocks, but looks it up without its last two. So it never finds a prompt that is one token longer
// than a multiple of the block size, and it dies of a prompt of one token.
//
// Config.Extra: shared_storage_path (the folder; engines with the same one share it), cache_hit_threshold ("1": the
// engine knows that member of a request, as with vllm#24520; vLLM 0.32.0 does not).
type sharedStorage struct {
	core.NoConnector
	host      *proto.Host
	store     *proto.Store
	threshold bool
}

// Start starts the connector of an engine.
func Start(h *proto.Host) (core.Connector, error) {
	// Folders are named by the tokens alone, whatever seeds the process's hashes.
	store, err := proto.OpenStore(h, h.Extra["shared_storage_path"], "sharedstorage")
	if err != nil {
		return nil, err
	}
	return &sharedStorage{host: h, store: store, threshold: h.Extra["cache_hit_threshold"] == "1"}, nil
}

func (c *sharedStorage) Begin(r *core.Generation) core.Transfer { return &filed{c: c, request: r} }

// Unspecified says where /metrics counts what was found: no tier that it knows.
func (*sharedStorage) Unspecified() bool { return true }

// filed is one request's side. Whatever its role, an engine looks prompts up, and saves those that it did not find.
type filed struct {
	core.NoTransfer
	c       *sharedStorage
	request *core.Generation
	found   int // tokens in the folder
	loads   bool
}

// aligned cuts a length, less one token, to whole blocks.
func (t *filed) aligned(tokens int) int {
	size := t.c.host.Core.BlockSize
	return (tokens - 1) / size * size
}

func (t *filed) lookup(s *core.Sequence) int {
	if n := t.aligned(s.Prompt - 1); n > 0 && t.c.store.Has([]core.TokenKey{core.KeyOf(s.Tokens[:n])}) == 1 {
		return n
	}
	return 0
}

// Arrived judges before anything is scheduled.
func (t *filed) Arrived(_ context.Context, s *core.Sequence) (string, error) {
	if s.Prompt == 1 {
		return "", &core.Death{Why: "IndexError: index out of range in self, for a lookup of a negative length"}
	}
	if t.request.Local {
		return "", nil
	}
	t.found = t.lookup(s)
	if !t.c.threshold {
		return "", nil
	}
	var threshold float64 // 0 where the member is absent or no number
	_ = json.Unmarshal(t.request.Member("cache_hit_threshold"), &threshold)
	if float64(max(t.found, t.c.host.Core.Known(s))) < threshold*float64(s.Prompt) {
		return "cache_threshold", nil
	}
	return "", nil
}

func (t *filed) External() bool              { return t.found > 0 }
func (t *filed) Promised(*core.Sequence) int { return t.found }

// Load reads the prompt's file, whatever part of it the engine has itself.
func (t *filed) Load(_ context.Context, s *core.Sequence) error {
	size := t.c.host.Core.BlockBytes
	data, err := t.c.store.Get(core.KeyOf(s.Tokens[:t.found]), t.found/t.c.host.Core.BlockSize*size)
	if err != nil {
		return &core.LoadError{Err: err}
	}
	var blocks [][]byte
	for i := s.Computed / t.c.host.Core.BlockSize; i*size < len(data); i++ {
		blocks = append(blocks, data[i*size:(i+1)*size])
	}
	t.c.host.Core.Fill(s, blocks, t.found)
	t.loads = true
	return nil
}

// Prefilled saves a prompt that was not found, before the response is out.
func (t *filed) Prefilled(_ context.Context, s *core.Sequence) {
	n := t.aligned(s.Prompt)
	if t.loads || n == 0 {
		return
	}
	var data []byte
	for _, block := range t.c.host.Core.Read(s.Blocks[:n/t.c.host.Core.BlockSize]) {
		data = append(data, block...)
	}
	_ = t.c.store.Put(core.KeyOf(s.Tokens[:n]), data) // a folder that is full is no fault of the request's
}
