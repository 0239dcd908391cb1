// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"context"
	"encoding/hex"
	"encoding/json"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Media of a chat, and the encode stage: an engine with ec_role ec_producer encodes the
// media it gets and answers with where they are, one with ec_consumer takes those over
// that a request's ec_transfer_params name, or that lie in the folder, and encodes the
// others itself. It follows docs/features/ec_cpu_connector.md and
// ec_connector/example_connector.py of vLLM (vllm#47941).
//
// Config.Extra: ec_role, ec_shared_storage_path (ECExampleConnector's folder; without it
// an engine is ECCPUConnector with ec_enable_nixl).

// mediaTypes are the parts of a message that have to be encoded.
var mediaTypes = []string{"image_url", "audio_url", "video_url", "input_audio"}

// mediaHash names what a part holds: by its uuid, else by its content. ok is false for
// other parts.
func mediaHash(part json.RawMessage) (hash string, ok bool) {
	var p map[string]json.RawMessage
	var kind, uuid string
	if json.Unmarshal(part, &p) != nil || json.Unmarshal(p["type"], &kind) != nil {
		return "", false
	}
	for _, t := range mediaTypes {
		if t != kind {
			continue
		}
		if json.Unmarshal(p["uuid"], &uuid) == nil && uuid != "" {
			return uuid, true
		}
		var content bytes.Buffer
		if json.Compact(&content, p[kind]) != nil {
			return "", false
		}
		key := KeyOf(tokenise(kind + content.String()))
		var b [16]byte
		for i := range b {
			b[i] = byte(key[i/8] >> (i % 8 * 8))
		}
		return hex.EncodeToString(b[:]), true
	}
	return "", false
}

// mediaText stands for a part in the prompt: tokens that only this medium has.
func mediaText(part json.RawMessage) string {
	if hash, ok := mediaHash(part); ok {
		return "<medium " + hash + ">"
	}
	return ""
}

// mediaOf gives the distinct hashes of a chat's media, in order.
func mediaOf(body []byte) []string {
	var q struct {
		Messages []struct {
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
	}
	if json.Unmarshal(body, &q) != nil {
		return nil
	}
	var all []string
	seen := map[string]bool{}
	for _, m := range q.Messages {
		var parts []json.RawMessage
		if json.Unmarshal(m.Content, &parts) != nil {
			continue
		}
		for _, part := range parts {
			if hash, ok := mediaHash(part); ok && !seen[hash] {
				seen[hash] = true
				all = append(all, hash)
			}
		}
	}
	return all
}

// embedding is an engine's answer for one medium, and what it is asked by.
type embedding struct {
	Metadata map[string]any `json:"metadata"`
	Host     string         `json:"peer_host,omitempty"`
	Port     int            `json:"peer_port,omitempty"`
	Size     int            `json:"size_bytes,omitempty"`
}

// encodeMedia does the engine's part for a chat, and gives its ec_transfer_params; nil
// for none.
func (n *node) encodeMedia(ctx context.Context, body []byte) any {
	role := n.cfg.Extra["ec_role"]
	if role == "" {
		return nil
	}
	media := mediaOf(body)
	if len(media) == 0 {
		return nil
	}
	if role == "ec_consumer" {
		n.takeMedia(ctx, media, body)
		return nil
	}
	published := map[string]embedding{}
	for _, hash := range media {
		n.stats.add(&n.stats.MediaEncoded, 1)
		e := embedding{Metadata: map[string]any{}}
		if dir := n.cfg.Extra["ec_shared_storage_path"]; dir != "" {
			_ = os.WriteFile(filepath.Join(dir, fileName(hash)), []byte(hash), 0o600) // a folder that is full is no fault of the request's
		} else if addr, ok := n.ln.Addr().(*net.TCPAddr); ok {
			n.media.Store(hash, true)
			e.Host, e.Port, e.Size = addr.IP.String(), addr.Port, len(hash)
		}
		published[hash] = e
	}
	return published
}

// fileName keeps a client's uuid from being a path.
func fileName(hash string) string {
	key := KeyOf(tokenise(hash))
	return itoa(int(key[0]>>1)) + ".ec"
}

// takeMedia takes over what others have encoded; the rest the engine encodes itself.
func (n *node) takeMedia(ctx context.Context, media []string, body []byte) {
	var q struct {
		Params map[string]json.RawMessage `json:"ec_transfer_params"`
	}
	_ = json.Unmarshal(body, &q)
	for _, hash := range media {
		var e embedding
		switch dir := n.cfg.Extra["ec_shared_storage_path"]; {
		case dir != "":
			if _, err := os.Stat(filepath.Join(dir, fileName(hash))); err == nil {
				n.stats.add(&n.stats.MediaLoaded, 1)
				continue
			}
		case json.Unmarshal(q.Params[hash], &e) == nil && fetched(ctx, e, hash):
			n.stats.add(&n.stats.MediaLoaded, 1)
			continue
		}
		n.stats.add(&n.stats.MediaComputed, 1)
	}
}

const mediaPath = "/sim/media/"

// fetched asks the engine that published a medium for it.
func fetched(ctx context.Context, e embedding, hash string) bool {
	if e.Host == "" {
		return false
	}
	ctx, stop := context.WithTimeout(ctx, 2*time.Second)
	defer stop()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(e.Host, itoa(e.Port))+mediaPath+hex.EncodeToString([]byte(hash)), nil)
	if err != nil {
		return false
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(r)
	if err != nil {
		return false
	}
	_ = resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// giveMedium answers whether this engine has encoded a medium.
func (n *node) giveMedium(w http.ResponseWriter, r *http.Request) {
	name, _ := strings.CutPrefix(r.URL.Path, mediaPath)
	hash, err := hex.DecodeString(name)
	if _, ok := n.media.Load(string(hash)); err != nil || !ok {
		n.writeError(w, errNotFound())
		return
	}
	w.WriteHeader(http.StatusOK)
}
