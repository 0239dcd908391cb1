// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"errors"
)

// sharedStorage keeps whole prompts in a folder, and finds whole prompts only. It
// follows kv_connector/v1/example_connector.py and captures/example of vLLM 0.32.0:
// what is saved is the prompt less one token, cut to whole blocks, while the lookup
// takes one token off twice; so a prompt that is one longer than a multiple of the
// block size is never found, and one of a single token kills the engine.
//
// Config.Extra: shared_storage_path (the folder; engines with the same one share
// it), cache_hit_threshold ("1": the engine knows that member of a request, as with
// vllm#24520; vLLM 0.32.0 does not).
type sharedStorage struct {
	noConnector
	host      *host
	store     *blockStore
	threshold bool
}

func startSharedStorage(h *host) (connector, error) {
	// Folders are named by the tokens alone, whatever seeds the process's hashes.
	store, err := openStore(h, h.extra["shared_storage_path"], "sharedstorage")
	if err != nil {
		return nil, err
	}
	return &sharedStorage{host: h, store: store, threshold: h.extra["cache_hit_threshold"] == "1"}, nil
}

func (c *sharedStorage) begin(r *kvRequest) transfer { return &filed{c: c, request: r} }

// unspecified says where /metrics counts what was found: no tier that it knows.
func (*sharedStorage) unspecified() bool { return true }

// filed is one request's side. Roles do not matter: each engine looks up, and saves
// what it did not find.
type filed struct {
	noTransfer
	c       *sharedStorage
	request *kvRequest
	found   int // tokens in the folder
	loads   bool
}

// aligned cuts a length, less one token, to whole blocks.
func (t *filed) aligned(tokens int) int {
	size := t.c.host.core.blockSize
	return (tokens - 1) / size * size
}

func (t *filed) lookup(s *sequence) int {
	if n := t.aligned(s.prompt - 1); n > 0 && t.c.store.has([]TokenKey{KeyOf(s.tokens[:n])}) == 1 {
		return n
	}
	return 0
}

// arrived judges before anything is scheduled.
func (t *filed) arrived(_ context.Context, s *sequence) (string, error) {
	if s.prompt == 1 {
		return "", &engineDeath{"IndexError: index out of range in self, for a lookup of a negative length"}
	}
	if t.request.local {
		return "", nil
	}
	t.found = t.lookup(s)
	if !t.c.threshold {
		return "", nil
	}
	var threshold float64 // 0 where the member is absent or no number
	_ = json.Unmarshal(t.request.member("cache_hit_threshold"), &threshold)
	if float64(max(t.found, t.c.host.core.known(s))) < threshold*float64(s.prompt) {
		return "cache_threshold", nil
	}
	return "", nil
}

func (t *filed) external() bool         { return t.found > 0 }
func (t *filed) promised(*sequence) int { return t.found }

var errFileGone = errors.New("the folder has lost a prompt")

// load reads the prompt's file, whatever part of it the engine has itself.
func (t *filed) load(_ context.Context, s *sequence) error {
	size := t.c.host.core.blockBytes
	data, ok, err := t.c.store.get(KeyOf(s.tokens[:t.found]))
	if err == nil && (!ok || len(data) != t.found/t.c.host.core.blockSize*size) {
		err = errFileGone
	}
	if err != nil {
		return &loadError{err: err}
	}
	var blocks [][]byte
	for i := s.computed / t.c.host.core.blockSize; i*size < len(data); i++ {
		blocks = append(blocks, data[i*size:(i+1)*size])
	}
	t.c.host.core.fill(s, blocks, t.found)
	t.loads = true
	return nil
}

// prefilled saves a prompt that was not found, before the answer is out.
func (t *filed) prefilled(_ context.Context, s *sequence) {
	n := t.aligned(s.prompt)
	if t.loads || n == 0 {
		return
	}
	var data []byte
	for _, block := range t.c.host.core.read(s.blocks[:n/t.c.host.core.blockSize]) {
		data = append(data, block...)
	}
	_ = t.c.store.put(KeyOf(s.tokens[:n]), data) // a folder that is full is no fault of the request's
}
