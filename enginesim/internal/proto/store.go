// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"encoding/hex"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// Store is a content-addressed store of KV blocks in a folder: what the engines of a shared store have in common. A
// block's key is that of all tokens up to its end, mixed with the seed of the engines' hashes: engines whose
// PYTHONHASHSEED differs never find each other's blocks, as with the real ones.
type Store struct {
	dir   string
	seed  string
	shape uint64 // blocks of another model or shape are never found either
}

// OpenStore opens the store in a folder, which it makes if need be.
func OpenStore(h *Host, dir, seed string) (*Store, error) {
	if dir == "" {
		return nil, errors.New("the connector's store needs a folder")
	}
	if err := os.MkdirAll(dir, 0o750); err != nil {
		return nil, err
	}
	return &Store{dir: dir, seed: seed, shape: h.Hello().Compat}, nil
}

func (b *Store) path(key core.TokenKey) string {
	seed := core.KeyOf(core.Tokenise(b.seed))
	var name [16]byte
	for i, v := range []uint64{core.Mix(key[0], seed[0]^b.shape), core.Mix(key[1], seed[1])} {
		for at := range 8 {
			name[i*8+at] = byte(v >> (8 * at))
		}
	}
	return filepath.Join(b.dir, hex.EncodeToString(name[:])+".kv")
}

// Put writes a block whole or not at all.
func (b *Store) Put(key core.TokenKey, block []byte) error {
	path := b.path(key)
	if _, err := os.Stat(path); err == nil {
		return nil
	}
	f, err := os.CreateTemp(b.dir, "new-*")
	if err != nil {
		return err
	}
	_, err = f.Write(block)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return err
	}
	return os.Rename(f.Name(), path)
}

// ErrGone is a block that the store has no more.
var ErrGone = errors.New("the store has lost a block")

// Get reads a block of so many bytes.
func (b *Store) Get(key core.TokenKey, size int) ([]byte, error) {
	block, err := os.ReadFile(b.path(key))
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(block) != size {
		return nil, ErrGone
	}
	return block, err
}

// Load fills a sequence's blocks with what the store has under the keys of the tokens up to upto, and counts those as
// computed.
func (b *Store) Load(c *core.Core, s *core.Sequence, upto int) (blocks int, err error) {
	var contents [][]byte
	for i := s.Computed / c.BlockSize; i*c.BlockSize < upto; i++ {
		content, err := b.Get(s.Keys[i], c.BlockBytes)
		if err != nil {
			return 0, err
		}
		contents = append(contents, content)
	}
	c.Fill(s, contents, upto)
	return len(contents), nil
}

// Has counts how many of the keys, from the first on, are there.
func (b *Store) Has(keys []core.TokenKey) int {
	for i, key := range keys {
		if _, err := os.Stat(b.path(key)); err != nil {
			return i
		}
	}
	return len(keys)
}
