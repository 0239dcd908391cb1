// SPDX-License-Identifier: Apache-2.0

package stream

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sse"
)

// pieces gives one piece of a response for each Read.
type pieces struct {
	left []string
	err  error // after the last one; nil: io.EOF

	together bool // io.EOF comes with the last one
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.left) == 0 {
		if p.err != nil {
			return 0, p.err
		}
		return 0, io.EOF
	}
	n := copy(b, p.left[0])
	if p.left[0] = p.left[0][n:]; p.left[0] == "" {
		p.left = p.left[1:]
	}
	if p.together && len(p.left) == 0 {
		return n, io.EOF
	}
	return n, nil
}

func (p *pieces) Close() error { return nil }

type owner struct{}

func (owner) Fault([]byte) []byte { return []byte(`{"error":{"message":"clean"}}`) }
func (owner) Usage([]byte)        {}

const (
	role  = `data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}` + "\n\n"
	token = `data: {"choices":[{"index":0,"delta":{"content":"a"}}]}` + "\n\n"
	fault = `data: {"error":{"message":"no","code":500}}` + "\n\n"
	done  = "data: [DONE]\n\n"
)

// read opens a response and reads it to its end. It returns what the client got, and the head's error or the end's.
func read(c Config, p *pieces, unframed bool) (got string, headErr, endErr error) {
	resp := &http.Response{StatusCode: 200, Body: p, ContentLength: -1}
	if !unframed {
		resp.TransferEncoding = []string{"chunked"}
	}
	c.Owner = owner{}
	s := &Stream{Config: c}
	s.Open(resp)
	defer s.Close()
	if err := s.Head(); err != nil {
		return "", err, nil
	}
	for {
		piece, err := s.Next()
		got += string(piece)
		if err != nil {
			return got, nil, err
		}
	}
}

// What clients get of an error lacks members that tell its status.
func TestAnErrorIsJudgedAsItsEngineWroteIt(t *testing.T) {
	long := `data: {"id":"` + strings.Repeat("x", 3<<10)
	for _, said := range [][]string{{fault}, {role, fault[:20], fault[20:]}, {long, `",` + fault[len("data: {"):]}} {
		_, err, _ := read(Config{Events: true, Guarded: true}, &pieces{left: said}, false)
		f, ok := errors.AsType[*Failure](err)
		require.True(t, ok)
		require.Contains(t, string(f.Event), `"code":500`)
	}
}

func TestTheHeadIsJudgedBeforeAnythingGoesOut(t *testing.T) {
	broke := errors.New("broke")
	for name, c := range map[string]struct {
		pieces []string
		err    error
		says   string // the failure; "" for none
	}{
		"a token":                        {pieces: []string{role, token, done}},
		"an event in two pieces":         {pieces: []string{role + token[:9], token[9:], done}},
		"an error in place of a token":   {pieces: []string{role, fault}, says: "event"},
		"nothing":                        {says: "empty"},
		"an end before the first token":  {pieces: []string{role}, says: "before its first token"},
		"a connection that breaks early": {pieces: []string{role}, err: broke, says: "broke"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err, end := read(Config{Events: true, Guarded: true}, &pieces{left: c.pieces, err: c.err}, false)
			if c.says == "" {
				require.NoError(t, err)
				require.Equal(t, io.EOF, end)
				require.Equal(t, role+token+done, got)
				return
			}
			require.Error(t, err)
			if f, ok := errors.AsType[*Failure](err); ok && f.Event != nil {
				require.Equal(t, "event", c.says)
				return
			}
			require.Contains(t, err.Error(), c.says)
		})
	}
}

func TestAHeadThatIsTheWholeResponseIsJudgedByItsEnd(t *testing.T) {
	for _, unframed := range []bool{true, false} {
		p := &pieces{left: []string{token}, together: true}
		_, err, _ := read(Config{Events: true, Guarded: true}, p, unframed)
		require.Equal(t, unframed, err != nil, "%v", err)
	}
}

func TestTheEndShowsWhetherAResponseIsWhole(t *testing.T) {
	aborted := `data: {"choices":[{"index":0,"delta":{},"finish_reason":"abort"}]}` + "\n\n"
	for name, c := range map[string]struct {
		pieces   []string
		unframed bool
		fails    bool
	}{
		"[DONE]":                               {pieces: []string{token, done}},
		"an error after a token":               {pieces: []string{role + token + fault, done}, fails: true},
		"an abort":                             {pieces: []string{token, aborted, done}, fails: true},
		"no [DONE], and the framing is HTTP's": {pieces: []string{token, token}},
		"no [DONE], and nothing else ends it":  {pieces: []string{token, token}, unframed: true, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			got, err, end := read(Config{Events: true, Guarded: true}, &pieces{left: c.pieces}, c.unframed)
			require.NoError(t, err)
			_, failed := errors.AsType[*Failure](end)
			require.Equal(t, c.fails, failed, "%v", end)
			if failed {
				require.NotContains(t, got, "[DONE]")
			}
		})
	}
}

// Each filter sees what the one before it has left.
func TestTheChainOfFilters(t *testing.T) {
	handoff := `data: {"choices":[{"index":0,"text":"a"}],"kv_transfer_params":{"host":"10.0.0.1"}}` + "\n\n"
	late := `data: {"error":{"message":"at 10.0.0.1"}}` + "\n\n"
	member := sse.MemberAt("kv_transfer_params")
	got, err, end := read(Config{Events: true, Length: -1, Withheld: member, Depth: member.Depth,
		Rewrite: func(data []byte) ([]byte, error) {
			return []byte(strings.ReplaceAll(string(data), `"a"`, `"b"`)), nil
		}}, &pieces{left: []string{handoff, late, done}}, false)
	require.NoError(t, err)
	_, failed := errors.AsType[*Failure](end)
	require.True(t, failed, "%v", end)
	require.NotContains(t, got, "[DONE]")
	require.Contains(t, got, `"text":"b"`)
	require.NotContains(t, got, "10.0.0.1")
	require.Contains(t, got, "clean")
}

func TestAReadThatFillsTheBufferIsFollowedByALargerOne(t *testing.T) {
	long := strings.Repeat(token, 2000)
	got, err, end := read(Config{Events: true, Guarded: true}, &pieces{left: []string{token, long, done}}, false)
	require.NoError(t, err)
	require.Equal(t, io.EOF, end)
	require.Equal(t, token+long+done, got)
	s := Of([]byte("whole"), false, owner{})
	piece, err := s.Next()
	require.NoError(t, err)
	require.Equal(t, "whole", string(piece))
	_, err = s.Next()
	require.Equal(t, io.EOF, err)
}
