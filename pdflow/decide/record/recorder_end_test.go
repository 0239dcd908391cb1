// SPDX-License-Identifier: Apache-2.0

package record_test

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/decide/record"
)

// end samples and ends a decision.
func end(r *record.Recorder) {
	x := r.Sample(&pdflow.PickInput{})
	x.Time = time.Now()
	r.End(x)
}

// With a look at each 20 ms, this would take hours.
func TestAnIdleRecorderIsWokenByNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := record.New(record.Options{Header: record.Header{Share: 1}, Open: (&files{}).open})
		for n := int64(1); n <= 3; n++ {
			time.Sleep(30_000 * time.Hour)
			end(r)
			synctest.Wait()
			written, _ := r.Counts()
			assert.Equal(t, n, written, "it is written at once")
		}
		r.Close()
	})
}

func TestEachDecisionIsWrittenOrLostHoweverLateItEnds(t *testing.T) {
	for range 200 {
		var told [2]atomic.Int64
		r := record.New(record.Options{Header: record.Header{Share: 1}, Open: (&files{}).open,
			Count: func(written, lost int64) { told[0].Add(written); told[1].Add(lost) }})
		var ends sync.WaitGroup
		for range 8 {
			ends.Go(func() {
				for range 20 {
					end(r)
				}
			})
		}
		r.Close()
		r.Close() // is the same
		ends.Wait()
		written, lost := r.Counts()
		require.Equal(t, int64(160), written+lost)
		require.Equal(t, [2]int64{written, lost}, [2]int64{told[0].Load(), told[1].Load()})
	}
}

// stuck is a file on a disk that hangs.
type stuck struct{ until chan struct{} }

func (s stuck) Write(b []byte) (int, error) { <-s.until; return len(b), nil }
func (s stuck) Close() error                { return nil }

func TestADiskThatHangsKeepsNobodyFromClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk, told := stuck{make(chan struct{})}, []error{}
		r := record.New(record.Options{Header: record.Header{Share: 1},
			Open:   func() (io.WriteCloser, error) { return disk, nil },
			Failed: func(err error) { told = append(told, err) }})
		for range 5 {
			end(r)
			time.Sleep(time.Second)
		}
		begun := time.Now()
		r.Close()
		assert.Equal(t, 3*time.Second, time.Since(begun))
		require.Len(t, told, 1)
		assert.ErrorContains(t, told[0], "cannot be closed within 3s")
		end(r)
		close(disk.until)
		synctest.Wait()
		written, lost := r.Counts()
		assert.Zero(t, written)
		assert.Equal(t, int64(6), lost, "each of them once")
	})
}

// moved is a file that somebody may move away.
type moved struct {
	*bytes.Buffer
	gone *bool
}

func (m moved) Close() error { return nil }
func (m moved) Gone() bool   { return *m.gone }

func TestAFileThatWasMovedIsFollowedByAnotherOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var all []moved
		r := record.New(record.Options{Header: record.Header{Share: 1}, Open: func() (io.WriteCloser, error) {
			all = append(all, moved{&bytes.Buffer{}, new(bool)})
			return all[len(all)-1], nil
		}})
		for i := range 9 {
			end(r)
			time.Sleep(time.Second)
			synctest.Wait()
			*all[len(all)-1].gone = i%3 == 2
		}
		r.Close()
		require.Len(t, all, 3)
		var first record.Header
		for i, f := range all {
			report, err := record.Verify(strings.NewReader(f.String()))
			require.NoError(t, err)
			assert.Equal(t, 3, report.Read)
			if i == 0 {
				first = report.Header
			}
			assert.Equal(t, first.Recorder, report.Header.Recorder)
			assert.Equal(t, time.Duration(i)*3*time.Second, report.Header.After)
		}
		written, lost := r.Counts()
		assert.Equal(t, [2]int64{9, 0}, [2]int64{written, lost})
	})
}

// A decision that was long on its way does not put the clock back.
func TestAFileBeginsNoEarlierThanTheOneBefore(t *testing.T) {
	var f files
	r := record.New(record.Options{Header: record.Header{Share: 1}, Open: f.open, MaxBytes: 1})
	for _, at := range []int64{100, 40, 130} {
		x := r.Sample(&pdflow.PickInput{})
		x.Time = time.Unix(at, 0)
		r.End(x)
	}
	r.Close()
	require.Len(t, f.all, 3)
	for i, want := range []time.Duration{0, 0, 30 * time.Second} {
		h, entries, err := record.Read(strings.NewReader(f.text(i)))
		require.NoError(t, err)
		assert.Equal(t, want, h.After)
		for e := range entries {
			assert.Equal(t, []int64{100, 40, 130}[i], e.Time.Unix())
		}
	}
}
