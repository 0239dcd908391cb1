// SPDX-License-Identifier: Apache-2.0

package server

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/api"
	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// media is an engine's part in the encode stage. An engine with the role ec_producer encodes the media that it gets and
// says in its response where they are. One with ec_consumer takes over the media that a request's ec_transfer_params
// name, or that lie in the folder, and encodes the others itself. It follows docs/features/ec_cpu_connector.md and
// ec_connector/example_connector.py of vLLM (vllm#47941).
//
// Config.Extra: ec_role, ec_shared_storage_path (ECExampleConnector's folder; without it an engine is ECCPUConnector
// with ec_enable_nixl).
type media struct {
	role, dir string
	stats     *core.Counters
	address   net.Addr // of the engine
	encoded   sync.Map // hashes
	client    *http.Client
}

func newMedia(extra map[string]string, stats *core.Counters, address net.Addr) *media {
	return &media{role: extra["ec_role"], dir: extra["ec_shared_storage_path"], stats: stats, address: address,
		client: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}}
}

// embedding is what an engine says of one medium, and what other engines ask it by.
type embedding struct {
	Metadata map[string]any `json:"metadata"`
	Host     string         `json:"peer_host,omitempty"`
	Port     int            `json:"peer_port,omitempty"`
	Size     int            `json:"size_bytes,omitempty"`
}

// encode does the engine's part for a chat, and gives its ec_transfer_params; nil for none.
func (m *media) encode(ctx context.Context, body []byte) any {
	if m.role == "" {
		return nil
	}
	hashes := api.MediaOf(body)
	if len(hashes) == 0 {
		return nil
	}
	if m.role == "ec_consumer" {
		m.take(ctx, hashes, body)
		return nil
	}
	published := map[string]embedding{}
	for _, hash := range hashes {
		m.stats.Add(&m.stats.MediaEncoded, 1)
		e := embedding{Metadata: map[string]any{}}
		if m.dir != "" {
			// A folder that is full is no fault of the request's.
			_ = os.WriteFile(filepath.Join(m.dir, fileName(hash)), []byte(hash), 0o600)
		} else if addr, ok := m.address.(*net.TCPAddr); ok {
			m.encoded.Store(hash, true)
			e.Host, e.Port, e.Size = addr.IP.String(), addr.Port, len(hash)
		}
		published[hash] = e
	}
	return published
}

// fileName keeps a client's uuid from being a path.
func fileName(hash string) string {
	key := core.KeyOf(core.Tokenise(hash))
	return strconv.Itoa(int(key[0]>>1)) + ".ec"
}

// take takes over what other engines have encoded. The engine encodes the rest itself.
func (m *media) take(ctx context.Context, hashes []string, body []byte) {
	var q struct {
		Params map[string]json.RawMessage `json:"ec_transfer_params"`
	}
	_ = json.Unmarshal(body, &q)
	for _, hash := range hashes {
		var e embedding
		switch {
		case m.dir != "":
			if _, err := os.Stat(filepath.Join(m.dir, fileName(hash))); err == nil {
				m.stats.Add(&m.stats.MediaLoaded, 1)
				continue
			}
		case json.Unmarshal(q.Params[hash], &e) == nil && m.fetched(ctx, e, hash):
			m.stats.Add(&m.stats.MediaLoaded, 1)
			continue
		}
		m.stats.Add(&m.stats.MediaComputed, 1)
	}
}

const mediaPath = "/sim/media/"

// fetched asks the engine that published a medium for it.
func (m *media) fetched(ctx context.Context, e embedding, hash string) bool {
	if e.Host == "" {
		return false
	}
	ctx, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://"+net.JoinHostPort(e.Host, strconv.Itoa(e.Port))+mediaPath+hex.EncodeToString([]byte(hash)), nil)
	if err != nil {
		return false
	}
	resp, err := m.client.Do(r)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// give answers whether this engine has encoded a medium.
func (m *media) give(w http.ResponseWriter, r *http.Request) {
	name, _ := strings.CutPrefix(r.URL.Path, mediaPath)
	hash, err := hex.DecodeString(name)
	if _, ok := m.encoded.Load(string(hash)); err != nil || !ok {
		api.WriteError(w, api.ErrNotFound())
		return
	}
	w.WriteHeader(http.StatusOK)
}
