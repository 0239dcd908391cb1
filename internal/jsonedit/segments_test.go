// SPDX-License-Identifier: Apache-2.0

package jsonedit

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func someSegments(t *testing.T) (*Segments, string) {
	t.Helper()
	d, err := Parse([]byte(`{"a":1,"b":"` + strings.Repeat("text", 1000) + `","c":true}`))
	require.NoError(t, err)
	s := new(Segments)
	d.Splice([]Edit{set("a", "2"), set("d", `"`+strings.Repeat("new", 1000)+`"`), del("c")}, s)
	require.Greater(t, len(s.parts), 3)
	return s, string(s.AppendTo(nil))
}

func TestReaderGivesTheDocument(t *testing.T) {
	s, want := someSegments(t)
	require.NoError(t, iotest.TestReader(s.NewReader(), []byte(want)))

	r := s.NewReader()
	for read := range len(want) {
		require.Equal(t, len(want)-read, r.Len())
		n, err := r.Read(make([]byte, 1))
		require.NoError(t, err)
		require.Equal(t, 1, n)
	}
	n, err := r.Read(make([]byte, 1))
	assert.Zero(t, n)
	assert.ErrorIs(t, err, io.EOF)

	n, err = s.NewReader().Read(make([]byte, len(want)))
	assert.NoError(t, err)
	assert.Equal(t, len(want), n, "a read fills what it is given")

	r = s.NewReader()
	n, err = r.Read(nil)
	assert.NoError(t, err)
	assert.Zero(t, n)
	assert.Equal(t, len(want), r.Len())
}

func TestReaderWritesTheRest(t *testing.T) {
	s, want := someSegments(t)
	r := s.NewReader()
	_, err := io.ReadFull(r, make([]byte, 100))
	require.NoError(t, err)
	var b bytes.Buffer
	n, err := r.WriteTo(&b)
	require.NoError(t, err)
	assert.Equal(t, int64(len(want)-100), n)
	assert.Equal(t, want[100:], b.String())
	assert.Zero(t, r.Len())
	n, err = r.WriteTo(&b)
	assert.NoError(t, err)
	assert.Zero(t, n)
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

func TestReaderCountsWhatAWriterTook(t *testing.T) {
	s, want := someSegments(t)
	broken := errors.New("broken")
	left := 100
	r := s.NewReader()
	n, err := r.WriteTo(writerFunc(func(p []byte) (int, error) {
		if len(p) > left {
			return left, broken
		}
		left -= len(p)
		return len(p), nil
	}))
	assert.ErrorIs(t, err, broken)
	assert.Equal(t, int64(100), n)
	rest, err := io.ReadAll(r)
	require.NoError(t, err)
	assert.Equal(t, want[100:], string(rest))

	for _, took := range []int{0, -1, 1 << 20} {
		n, err = s.NewReader().WriteTo(writerFunc(func([]byte) (int, error) { return took, nil }))
		assert.ErrorIs(t, err, io.ErrShortWrite)
		assert.Zero(t, n, "a count that cannot be is not believed")
	}
}

func TestReadersOfOneDocumentDoNotMeet(t *testing.T) {
	s, want := someSegments(t)
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			got, err := io.ReadAll(iotest.HalfReader(s.NewReader()))
			assert.NoError(t, err)
			assert.Equal(t, want, string(got))
		})
	}
	all.Wait()
}

func TestAppendToKeepsWhatIsThere(t *testing.T) {
	s, want := someSegments(t)
	assert.Equal(t, "before"+want, string(s.AppendTo([]byte("before"))))
	var zero Segments
	assert.Empty(t, zero.AppendTo(nil))
	_, err := zero.NewReader().Read(make([]byte, 1))
	assert.ErrorIs(t, err, io.EOF)
}
