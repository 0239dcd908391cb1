// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"
)

// newTransport returns a transport with one pool for both engines. It closes idle connections before uvicorn does,
// which is after 5 s: otherwise a request could be written into a connection that uvicorn is closing.
func newTransport() *http.Transport {
	return &http.Transport{
		MaxIdleConnsPerHost: 1024,
		IdleConnTimeout:     4 * time.Second,
		DisableCompression:  true,
		ReadBufferSize:      16 << 10, // a stream's chunks that came together leave together
	}
}

// proxy sends each request to the prefill engine, then with the handoff to the decode engine.
type proxy struct {
	prefill, decode string
	engines         http.RoundTripper
	copyBuffers     sync.Pool // *[]byte of 32 KiB
}

func newProxy(prefill, decode string, engines http.RoundTripper) *proxy {
	return &proxy{prefill: prefill, decode: decode, engines: engines, copyBuffers: sync.Pool{New: func() any {
		b := make([]byte, 32<<10)
		return &b
	}}}
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := readAll(r.Body, r.ContentLength)
	defer body.free()
	if err != nil {
		http.Error(w, "the request body broke off", http.StatusBadRequest)
		return
	}
	members, err := scan(body.bytes)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	res, err := p.send(r, p.prefill, prefillBody(body.bytes, members))
	if err != nil {
		http.Error(w, "prefill failed", http.StatusBadGateway)
		return
	}
	if res.StatusCode != http.StatusOK {
		p.pass(w, res)
		return
	}
	response, err := readAll(res.Body, res.ContentLength)
	res.Body.Close()
	defer response.free()
	handoff, found := handoffOf(response.bytes)
	if err != nil || !found {
		http.Error(w, "prefill gave no handoff", http.StatusBadGateway)
		return
	}
	if res, err = p.send(r, p.decode, decodeBody(body.bytes, members, handoff)); err != nil {
		http.Error(w, "decode failed", http.StatusBadGateway)
		return
	}
	p.pass(w, res)
}

// send sends one leg. It frees body, also on an error.
func (p *proxy) send(r *http.Request, engine string, body *buffer) (*http.Response, error) {
	size := int64(len(body.bytes))
	req, err := http.NewRequestWithContext(r.Context(), http.MethodPost, engine+r.URL.Path, &legBody{buffer: body})
	if err != nil {
		body.free()
		return nil, err
	}
	req.ContentLength = size
	for _, name := range []string{"Content-Type", "Accept", "Authorization", "X-Request-Id", "User-Agent"} {
		if v := r.Header[name]; v != nil {
			req.Header[name] = v
		}
	}
	return p.engines.RoundTrip(req)
}

// pass copies an engine's response to the client, and flushes each piece of a stream when it comes.
func (p *proxy) pass(w http.ResponseWriter, res *http.Response) {
	defer res.Body.Close()
	w.Header()["Content-Type"] = res.Header["Content-Type"]
	if res.ContentLength >= 0 {
		w.Header()["Content-Length"] = []string{strconv.FormatInt(res.ContentLength, 10)}
	}
	w.WriteHeader(res.StatusCode)
	flusher, _ := w.(http.Flusher)
	room := p.copyBuffers.Get().(*[]byte)
	defer p.copyBuffers.Put(room)
	for {
		n, err := res.Body.Read(*room)
		if n > 0 {
			if _, err := w.Write((*room)[:n]); err != nil {
				return
			}
			if res.ContentLength < 0 && flusher != nil {
				flusher.Flush()
			}
		}
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler) // a cut response must not look whole
		}
	}
}

// buffer is memory for a body. A pool keeps it for the next one.
type buffer struct{ bytes []byte }

var buffers = sync.Pool{New: func() any { return new(buffer) }}

func newBuffer(size int) *buffer {
	b := buffers.Get().(*buffer)
	b.bytes = slices.Grow(b.bytes[:0], size)
	return b
}

func (b *buffer) free() { buffers.Put(b) }

// readAll reads a body; length is -1 if it is unknown. The caller frees the buffer, also on an error.
func readAll(r io.Reader, length int64) (*buffer, error) {
	if length < 0 {
		b := newBuffer(0)
		rest, err := io.ReadAll(r)
		b.bytes = append(b.bytes, rest...)
		return b, err
	}
	b := newBuffer(int(length))
	b.bytes = b.bytes[:length]
	_, err := io.ReadFull(r, b.bytes)
	return b, err
}

// legBody is a request body that frees its buffer when it is closed. The transport may close it while another of
// its goroutines still reads, and may do so after RoundTrip has returned: hence the lock.
type legBody struct {
	mu     sync.Mutex
	buffer *buffer
	at     int
}

func (l *legBody) Read(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buffer == nil || l.at == len(l.buffer.bytes) {
		return 0, io.EOF
	}
	n := copy(p, l.buffer.bytes[l.at:])
	l.at += n
	return n, nil
}

func (l *legBody) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.buffer != nil {
		l.buffer.free()
		l.buffer = nil
	}
	return nil
}
