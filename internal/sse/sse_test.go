// SPDX-License-Identifier: Apache-2.0

package sse_test

import (
	"bytes"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/internal/sse"
)

func TestNextAndData(t *testing.T) {
	for stream, want := range map[string][]string{
		"data: a\n\ndata: b\n\n":         {"a", "b"},
		"data:a\r\n\r\ndata: b\r\n\r\n":  {"a", "b"},
		"\ufeffdata: a\n\n":              {"a"},
		"event: e\ndata: a\ndata: b\n\n": {"a\nb"},
		": a comment\n\n":                {""},
		"data: a\n":                      nil,
		"":                               nil,
	} {
		var got []string
		rest := []byte(stream)
		for {
			event, after, ok := sse.Next(rest)
			if !ok {
				break
			}
			got, rest = append(got, string(sse.Data(event))), after
		}
		assert.Equal(t, want, got, "%q", stream)
	}
}

// An event may have as many lines as fit into its 16 MB: each is copied once.
func TestDataOfManyLinesIsCopiedOnce(t *testing.T) {
	event := []byte(strings.Repeat("data: a\n", 10_000))
	assert.Equal(t, strings.Repeat("a\n", 9_999)+"a", string(sse.Data(event)))
	assert.Equal(t, strings.Repeat("data: a\n", 10_000), string(event))
	assert.Less(t, testing.AllocsPerRun(5, func() { sse.Data(event) }), 100.0)
}

// However the reads cut the stream, each event is changed once, and what has no data stays as it is.
func TestRewriter(t *testing.T) {
	const stream = ": hi\n\nevent: e\ndata: one\n\ndata: drop\n\ndata: two\nid: 7\n\ndata: [DONE]\n\ndata: cut"
	const want = ": hi\n\nevent: e\ndata: ONE\n\nid: 7\ndata: TWO\n\ndata: [DONE]\n\ndata: cut"
	upper := func(data []byte) ([]byte, error) {
		if string(data) == "drop" {
			return nil, nil
		}
		return bytes.ToUpper(data), nil
	}
	for name, src := range map[string]io.Reader{
		"in one read":  strings.NewReader(stream),
		"byte by byte": iotest.OneByteReader(strings.NewReader(stream)),
		"with its end": iotest.DataErrReader(strings.NewReader(stream)),
		"half by half": iotest.HalfReader(strings.NewReader(stream)),
	} {
		got, err := io.ReadAll(sse.NewRewriter(src, true, nil, upper))
		require.NoError(t, err, name)
		assert.Equal(t, want, string(got), name)
	}
	got, err := io.ReadAll(sse.NewRewriter(strings.NewReader("\ufeffdata: a\n\ndata: b\n\n"), true, nil, upper))
	require.NoError(t, err)
	assert.Equal(t, "data: A\n\ndata: B\n\n", string(got), "the mark of the byte order keeps no data")
	got, err = io.ReadAll(sse.NewRewriter(iotest.OneByteReader(strings.NewReader("whole")), false, nil, upper))
	require.NoError(t, err)
	assert.Equal(t, "WHOLE", string(got))
}

func TestRewriterErrors(t *testing.T) {
	broken, refused := errors.New("broken"), errors.New("refused")
	same := func(data []byte) ([]byte, error) { return data, nil }
	got, err := io.ReadAll(
		sse.NewRewriter(io.MultiReader(strings.NewReader("data: a\n\ndata: b"), iotest.ErrReader(broken)), true, nil,
			same),
	)
	require.ErrorIs(t, err, broken)
	assert.Equal(t, "data: a\n\n", string(got), "what was whole came through")
	_, err = io.ReadAll(sse.NewRewriter(strings.NewReader("data: a\n\n"), true, nil, func([]byte) ([]byte, error) {
		return nil, refused
	}))
	require.ErrorIs(t, err, refused)
	_, err = io.ReadAll(sse.NewRewriter(io.LimitReader(zeros{}, 65<<20), true, nil, same))
	require.ErrorIs(t, err, sse.ErrTooLarge)
}

// Large events between small ones, and reads of any size, change nothing about it.
func TestRewriterReusesItsBuffers(t *testing.T) {
	same := func(data []byte) ([]byte, error) { return data, nil }
	var stream strings.Builder
	for i := range 200 {
		stream.WriteString("data: " + strings.Repeat(strconv.Itoa(i), 1+i*i%7001) + "\n\n")
	}
	for _, size := range []int{1, 3, 100, 4096, 5000, 1 << 20} {
		src := iotest.HalfReader(strings.NewReader(stream.String()))
		var got bytes.Buffer
		_, err := io.CopyBuffer(struct{ io.Writer }{&got}, sse.NewRewriter(src, true, nil, same), make([]byte, size))
		require.NoError(t, err)
		require.Equal(t, stream.String(), got.String(), "reads of %d bytes", size)
	}
	p := make([]byte, 4<<10)
	paced := sse.NewRewriter(&endless{[]byte("data: " + strings.Repeat("x", 200) + "\n\n"), 1 << 20}, true, nil, same)
	assert.Zero(t, testing.AllocsPerRun(1000, func() { _, _ = paced.Read(p) }))
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// Events without the mark pass to the byte, however the reads cut them, and only the others reach the function.
func TestARewriterThatLooksForAMark(t *testing.T) {
	const in = "event: a\ndata: {\"text\":\"x\"}\n\n: comment\n\ndata: {\"n\":1}\r\n\r\ndata: {\"usage\":1}\n\n" +
		"data:{\"text\":\"y\"}\n\nevent: b\ndata: {\"usage\":2}\n\ndata: [DONE]\n\n"
	want := strings.NewReplacer(`{"usage":1}`, `{"usage":7}`, `{"usage":2}`, `{"usage":7}`).Replace(in)
	for size := range len(in) {
		var pieces []io.Reader
		for rest := in; rest != ""; {
			n := min(size+1, len(rest))
			pieces = append(pieces, strings.NewReader(rest[:n]))
			rest = rest[n:]
		}
		r := sse.NewRewriter(io.MultiReader(pieces...), true, []byte(`"usage"`), func(data []byte) ([]byte, error) {
			require.Contains(t, string(data), `"usage"`)
			return []byte(`{"usage":7}`), nil
		})
		got, err := io.ReadAll(r)
		require.NoError(t, err)
		require.Equal(t, want, string(got), "pieces of %d bytes", size+1)
	}
}
