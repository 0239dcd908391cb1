// SPDX-License-Identifier: Apache-2.0

package file_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/connector"
	"github.com/pdkit/pdkit/connector/nixl"
	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/file"
	"github.com/pdkit/pdkit/enginesim"
	"github.com/pdkit/pdkit/pdflow"
	"github.com/pdkit/pdkit/pdflow/pick"
	"github.com/pdkit/pdkit/transport"
)

// configMap is a folder as Kubernetes mounts a ConfigMap: each version is a folder of its own, to which the link ..data
// leads, through which the file's link leads. A change swaps ..data by renaming, and removes the old folder.
type configMap struct {
	t       *testing.T
	dir     string
	version int
}

func newConfigMap(t *testing.T, text string) *configMap {
	t.Helper()
	c := &configMap{t: t, dir: t.TempDir()}
	c.set(text)
	require.NoError(t, os.Symlink(filepath.Join("..data", "endpoints.yaml"), c.file()))
	return c
}

func (c *configMap) file() string { return filepath.Join(c.dir, "endpoints.yaml") }

func (c *configMap) set(text string) {
	c.t.Helper()
	c.version++
	folder := func(version int) string { return fmt.Sprint("..2026_", version) }
	require.NoError(c.t, os.Mkdir(filepath.Join(c.dir, folder(c.version)), 0o700))
	write(c.t, filepath.Join(c.dir, folder(c.version), "endpoints.yaml"), text)
	require.NoError(c.t, os.Symlink(folder(c.version), filepath.Join(c.dir, "..data_tmp")))
	require.NoError(c.t, os.Rename(filepath.Join(c.dir, "..data_tmp"), filepath.Join(c.dir, "..data")))
	require.NoError(c.t, os.RemoveAll(filepath.Join(c.dir, folder(c.version-1))))
}

// witness sees which engines form pairs. Engines say in their zone which version of the list they are from.
type witness struct {
	mixed atomic.Int64
	seen  sync.Map // versions that requests were served by
}

func (w *witness) SessionStart(_ context.Context, s *connector.Session) {
	if s.Prefill.Zone != s.Decode.Zone {
		w.mixed.Add(1)
	}
	w.seen.Store(s.Decode.Zone, true)
}

// versions are lists of four engines. Which two are for prefill changes with each, so an engine's role does, too.
func versions(t *testing.T, n int) (engines []*enginesim.Engine, list func(version int) string) {
	t.Helper()
	for range n {
		e, err := enginesim.Start(
			enginesim.Config{KVRole: enginesim.RoleBoth, DefaultMaxTokens: 4, ITL: time.Millisecond, KeepRequests: -1},
		)
		require.NoError(t, err)
		t.Cleanup(func() { _ = e.Close() })
		engines = append(engines, e)
	}
	return engines, func(version int) string {
		var b strings.Builder
		b.WriteString("endpoints:\n")
		for i, e := range engines {
			role := "prefill"
			if (i+version)%n < n/2 {
				role = "decode"
			}
			fmt.Fprintf(&b, "  - {url: %q, role: %s, zone: \"%d\"}\n", e.URL(), role, version)
		}
		return b.String()
	}
}

// load sends 200 requests a second, fewer where the machine has other work, until stop, which says how many there were;
// sent says how many there are so far. failed gets what was wrong with their responses.
func load(t *testing.T, url string, failed chan<- string) (sent, stop func() int64) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 50}, Timeout: 30 * time.Second}
	quit := make(chan struct{})
	var n atomic.Int64
	var all sync.WaitGroup
	tick := time.NewTicker(5 * time.Millisecond)
	for range 20 {
		all.Go(func() {
			for {
				select {
				case <-quit:
					return
				case <-tick.C:
				}
				resp, err := client.Post(url+"/v1/completions", "application/json",
					strings.NewReader(`{"max_tokens":4,"prompt":"request number `+strconv.FormatInt(n.Add(1), 10)+`"}`))
				if err == nil {
					var body []byte
					if body, err = io.ReadAll(resp.Body); err == nil && resp.StatusCode != http.StatusOK {
						err = fmt.Errorf("status %d: %s", resp.StatusCode, body)
					}
					_ = resp.Body.Close()
				}
				if err != nil {
					select {
					case failed <- err.Error():
					default:
					}
				}
			}
		})
	}
	stop = sync.OnceValue(func() int64 {
		close(quit)
		all.Wait()
		tick.Stop()
		client.CloseIdleConnections()
		return n.Load()
	})
	t.Cleanup(func() { stop() })
	return n.Load, stop
}

// A ConfigMap is swapped ten times a second, and roles with it, while requests run: none fails, no pair is of two
// versions, no list is one that nobody wrote, and the last version is the one that stays.
func TestAConfigMapThatIsSwappedTenTimesASecondUnderTraffic(t *testing.T) {
	const size, swaps = 4, 60
	engines, list := versions(t, size)
	c := newConfigMap(t, list(1))
	src, err := file.New(c.file(), &file.Options{Poll: time.Hour, Quiet: 10 * time.Millisecond})
	require.NoError(t, err)
	set, w := discovery.NewSet(src), &witness{}
	var told sync.Map
	set.OnError(func(err error) { told.Store(err.Error(), true) })
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()
	conn, err := nixl.New(nil)
	require.NoError(t, err)
	tr := transport.New(nil)
	flow, err := pdflow.New(conn, pick.New(set, pick.RoundRobin()), pdflow.WithTransport(tr),
		pdflow.WithObserver(pdflow.Observer{SessionStart: w.SessionStart}))
	require.NoError(t, err)
	gateway := httptest.NewServer(flow)
	t.Cleanup(func() {
		gateway.Close()
		assert.NoError(t, flow.Shutdown(context.Background()))
		_ = tr.Close()
		cancel()
		require.NoError(t, <-done)
	})
	last := func(version string) func(*discovery.Snapshot) bool {
		return func(s *discovery.Snapshot) bool { return len(s.Endpoints) > 0 && s.Endpoints[0].Zone == version }
	}
	require.NoError(t, set.WaitReady(ctx, last("1")))

	failed := make(chan string, 100)
	sent, stop := load(t, gateway.URL, failed)
	watching := make(chan int)
	go func() {
		snapshots := 0
		for s := range set.Changes(ctx) {
			snapshots++
			assert.Len(t, s.Endpoints, size)
			roles := map[discovery.Role]int{}
			for _, e := range s.Endpoints {
				roles[e.Role]++
				assert.Equal(t, s.Endpoints[0].Zone, e.Zone, "half a list")
			}
			assert.Equal(t, map[discovery.Role]int{discovery.RolePrefill: size / 2, discovery.RoleDecode: size / 2},
				roles)
			if last(strconv.Itoa(swaps))(s) {
				break
			}
		}
		watching <- snapshots
	}()
	served := func() (n int) {
		w.seen.Range(func(any, any) bool { n++; return true })
		return n
	}
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for version := 2; version <= swaps; version++ {
		<-tick.C
		c.set(list(version))
		require.Eventually(t, func() bool { return served() > version/4 }, time.Minute, time.Millisecond,
			"the changes reach the requests, later on a busy machine")
	}
	snapshots := <-watching
	require.Eventually(t, func() bool { return sent() > 100 }, time.Minute, time.Millisecond)
	n := stop()
	t.Logf("%d requests in %d versions of %d, %d snapshots", n, served(), swaps, snapshots)
	assert.Empty(t, failed)
	assert.Zero(t, w.mixed.Load(), "pairs of two versions")
	told.Range(func(err, _ any) bool { return assert.Fail(t, "told", err) })
	for _, e := range engines {
		require.NoError(t, e.WaitIdle(t.Context()))
		// The notice that a decode engine has read the blocks may still be on its way.
		assert.EventuallyWithT(t, func(t *assert.CollectT) { assert.NoError(t, e.CheckKV()) }, 20*time.Second,
			10*time.Millisecond)
	}
}
