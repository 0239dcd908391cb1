// SPDX-License-Identifier: Apache-2.0

package kvevents

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/inspect"
	"github.com/pdkit/pdkit/enginesim/zmq"
)

// What SGLang 0.5.23 sent on a CPU: idle, then four requests that run.
const (
	recordedIdle = "\x9b\xa8LoadStat\x00\x00\x00\xcd\x20\x00\x00\x00\x00\x08\x00\x00"
	recordedBusy = "\x9b\xa8LoadStat\x04\x00\xcc\xca\xcd\x20\x00\x00\x00\xcc\xca\x08\x3c\xcd\xf2\x9b"
)

func TestALoadIsReadAsItsEngineSentIt(t *testing.T) {
	stat := func(members string) string { return "\x96\xa8LoadStat" + members }
	const huge = "\xcf\xff\xff\xff\xff\xff\xff\xff\xff"
	few := rankLoad{requests: 3, usage: .3}
	for name, c := range map[string]struct {
		frame string
		want  rankLoad
		ok    bool
	}{
		"idle":             {recordedIdle, rankLoad{}, true},
		"busy":             {recordedBusy, rankLoad{requests: 4, usage: 202. / 8192}, true},
		"an older one":     {stat("\x01\x02\x03\x0a\xc0"), few, true},
		"without its rank": {"\x95" + stat("\x01\x02\x03\x0a")[1:], few, true},
		"a newer one":      {"\xdc\x00\x07" + stat("\x01\x02\x03\x0a\xc0\x81\xa1x\xc2")[1:], few, true},
		"all lengths": {stat("\xcc\x01\xcd\x00\x02\xce\x00\x00\x00\x03\xcf" +
			"\x00\x00\x00\x00\x00\x00\x00\x0a\x00"), few, true},
		"capacity unknown":           {stat("\x01\x02\x03\x00\xc0"), rankLoad{requests: 3, usage: -1}, true},
		"more in use than there is":  {stat("\x01\x02\x0b\x0a\xc0"), rankLoad{requests: 3, usage: 1}, true},
		"huge tokens":                {stat("\x01\x02" + huge + huge + "\xc0"), rankLoad{requests: 3, usage: 1}, true},
		"empty":                      {"", rankLoad{}, false},
		"no array":                   {"\xa8LoadStat\x01\x02\x03\x0a", rankLoad{}, false},
		"too few members":            {"\x94" + stat("\x01\x02\x03\x0a")[1:], rankLoad{}, false},
		"another tag":                {"\x96\xa8LoadStut\x01\x02\x03\x0a\xc0", rankLoad{}, false},
		"a batch of events":          {"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x90\x00", rankLoad{}, false},
		"negative":                   {stat("\xff\x02\x03\x0a\xc0"), rankLoad{}, false},
		"negative in eight bytes":    {stat("\xd3\xff\xff\xff\xff\xff\xff\xff\xff\x02\x03\x0a\xc0"), rankLoad{}, false},
		"huge":                       {stat(huge + "\x02\x03\x0a\xc0"), rankLoad{}, false},
		"two that are huge together": {stat(huge + huge + "\x03\x0a\xc0"), rankLoad{}, false},
		"nil":                        {stat("\x01\xc0\x03\x0a\xc0"), rankLoad{}, false},
		"a text":                     {stat("\xa11\x02\x03\x0a\xc0"), rankLoad{}, false},
		"a float":                    {stat("\xca\x00\x00\x00\x00\x02\x03\x0a\xc0"), rankLoad{}, false},
	} {
		got, ok := parseLoadStat([]byte(c.frame))
		assert.Equal(t, c.ok, ok, name)
		if ok {
			assert.Equal(t, c.want, got, name)
		}
	}
	for n := range 17 { // what is cut before the capacity
		_, ok := parseLoadStat([]byte(recordedBusy[:n]))
		assert.False(t, ok, n)
	}
}

// Whatever comes: no panic, and figures that make sense.
func FuzzLoadStats(f *testing.F) {
	f.Add([]byte(recordedIdle))
	f.Add([]byte(recordedBusy))
	f.Fuzz(func(t *testing.T, b []byte) {
		if r, ok := parseLoadStat(b); ok {
			assert.True(t, r.requests >= 0 && r.requests <= 2*maxRequests && r.usage >= -1 && r.usage <= 1, r)
			assert.False(t, math.IsNaN(r.usage))
		}
	})
}

// teller is the load stream of one rank.
type teller struct {
	t    *testing.T
	pub  *zmq.Listener
	mu   sync.Mutex
	stat string // is sent again and again; "" is silence
	done chan struct{}
}

func startTeller(t *testing.T, at string) *teller {
	t.Helper()
	r := &teller{t: t, done: make(chan struct{})}
	require.EventuallyWithT(t, func(c *assert.CollectT) {
		var err error
		r.pub, err = zmq.ListenPUB(at, 100)
		assert.NoError(c, err)
	}, 10*time.Second, 10*time.Millisecond)
	var running sync.WaitGroup
	running.Go(func() {
		for seq := 0; ; seq++ {
			r.mu.Lock()
			stat := r.stat
			r.mu.Unlock()
			if stat != "" {
				r.pub.Publish([]byte("load"), be(seq), []byte(stat))
			}
			select {
			case <-r.done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	})
	stop := sync.OnceFunc(func() { close(r.done); running.Wait(); r.pub.Close() })
	t.Cleanup(stop)
	return r
}

func (r *teller) say(stat string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stat = stat
}

// tells sends a load of below 128 requests and 256 tokens.
func (r *teller) tells(running, waiting, used, capacity byte) {
	r.say("\x96\xa8LoadStat" + string([]byte{running, waiting, 0xcc, used, 0xcc, capacity, 0xc0}))
}

func (r *teller) address() string { return "tcp://" + r.pub.Addr() }

// polledLoad is what an engine said of itself a moment ago.
func polledLoad() inspect.Load {
	return inspect.Load{At: time.Now(), Running: 1, Waiting: 2, KVUsage: .9, KV: inspect.KV{Taken: 7}}
}

// is waits until the engine's load is that of its stream, with these requests in all.
func is(t *testing.T, s *Subscriber, requests, waiting int, usage float64) inspect.Load {
	t.Helper()
	var l inspect.Load
	eventually(t, fmt.Sprint(requests, waiting, usage), func() bool {
		l = s.Load("p", polledLoad())
		return l.Running+l.Waiting == requests && l.Waiting == waiting && l.KVUsage == usage
	})
	assert.InDelta(t, 7, l.KV.Taken, 0, "what the stream does not tell is that of the poll")
	assert.Less(t, time.Since(l.At), 5*time.Second)
	return l
}

func TestTheLoadOfAnEngineIsThatOfAllItsRanks(t *testing.T) {
	a, b := startTeller(t, "127.0.0.1:0"), startTeller(t, "127.0.0.1:0")
	e := endpoint(t, "p", map[string]string{"loadEvents": a.address() + "," + b.address()})
	s := begin(t, newBook(), &Options{Loads: true}, e)
	a.tells(8, 4, 100, 200)
	time.Sleep(100 * time.Millisecond)
	is(t, s, 3, 2, .9) // of the other one nothing is known
	b.tells(1, 0, 150, 200)
	is(t, s, 13, 2, .75)
	b.tells(1, 0, 150, 0) // its capacity is unknown
	is(t, s, 13, 2, .9)
	a.tells(0, 1, 1, 200)
	b.tells(0, 0, 1, 250)
	is(t, s, 1, 1, .005) // fewer than the poll has seen waiting
	old := polledLoad()
	old.At = old.At.Add(-time.Minute)
	assert.Zero(t, s.Load("p", old).Waiting, "it waited a minute ago")
	assert.Equal(t, inspect.Load{}, s.Load("another", inspect.Load{}))
	b.say("") // silent, while the other one tells
	is(t, s, 3, 2, .9)
	b.tells(2, 0, 1, 250)
	is(t, s, 3, 2, .005)
	assert.Zero(t, s.Counts().Malformed)
}

func TestALoadStreamThatEndsCountsForNothing(t *testing.T) {
	a := startTeller(t, "127.0.0.1:0")
	var mu sync.Mutex
	var errs []string
	o := &Options{Loads: true, Observe: func(src Source, err error) {
		mu.Lock()
		defer mu.Unlock()
		var e *Error
		if errors.As(err, &e) && e.Op == "load" {
			errs = append(errs, fmt.Sprint(src.Engine, " ", src.Rank, " ", err))
		}
	}}
	s := beginAt(t, &patient, newBook(), o, endpoint(t, "p", map[string]string{"loadEvents": a.address()}))
	a.tells(8, 4, 100, 200)
	is(t, s, 12, 2, .5)
	at := a.pub.Addr()
	a.pub.Close()
	is(t, s, 3, 2, .9)
	a = startTeller(t, at) // the engine's next life
	a.tells(5, 0, 50, 200)
	is(t, s, 5, 2, .25)
	a.say("\xc1")
	eventually(t, "nonsense is counted, and changes nothing", func() bool { return s.Counts().Malformed > 2 })
	is(t, s, 5, 2, .25)
	a.say(strings.Repeat("x", maxStat)) // more than is read
	time.Sleep(50 * time.Millisecond)
	a.tells(6, 0, 50, 200)
	is(t, s, 6, 2, .25)
	mu.Lock()
	defer mu.Unlock()
	const broke = "p 0 kvevents: load: the engine cannot be reached, or broke off"
	assert.Equal(t, []string{broke, broke}, errs, "each failure is told once")
}

// A stream whose network is gone is silent, and its connection stays.
func TestASilentLoadStreamIsConnectedAnew(t *testing.T) {
	a := startTeller(t, "127.0.0.1:0")
	errs := make(chan error, 100)
	s := begin(t, newBook(), &Options{Loads: true, Observe: func(_ Source, err error) { errs <- err }},
		endpoint(t, "p", map[string]string{"loadEvents": a.address()}))
	assert.EqualError(t, <-errs, "kvevents: load: the engine tells no load")
	a.tells(8, 4, 100, 200)
	is(t, s, 12, 2, .5)
}

func TestLoadStreamsAreReadWhereTheyAreWanted(t *testing.T) {
	a := startTeller(t, "127.0.0.1:0")
	a.tells(8, 4, 100, 200)
	attributes := map[string]string{"loadEvents": a.address()}
	s := begin(t, newBook(), nil, endpoint(t, "p", attributes))
	time.Sleep(100 * time.Millisecond)
	is(t, s, 3, 2, .9)

	l := make(listed)
	s = beginWith(t, &quick, newBook(), &Options{Loads: true}, discovery.NewSet(l))
	l <- []discovery.Endpoint{endpoint(t, "p", attributes)}
	is(t, s, 12, 2, .5)
	l <- nil
	is(t, s, 3, 2, .9)
	eventually(t, "nothing is kept", func() bool { return s.loads.engines.Load() == 0 })
}

// SGLang names its load stream beside its events, and the entry may name another one.
func TestSGLangIsAskedWhereItTellsItsLoad(t *testing.T) {
	p, a, b := newPublisher(t, "a"), startTeller(t, "127.0.0.1:0"), startTeller(t, "127.0.0.1:0")
	a.tells(8, 4, 100, 200)
	b.tells(3, 0, 100, 200)
	port := func(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }
	client := roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Path != "/server_info" {
			return response(404, ""), nil
		}
		return response(200, `{"kv_events":{"publisher":"zmq","endpoint_port_base":`+port(p.pub.Addr())+
			`,"dp_size":1,"load_endpoint_port_base":`+port(a.address())+`,"load_topic":"load"}}`), nil
	})
	is(t, begin(t, newBook(), &Options{Loads: true, Client: client}, endpoint(t, "p", nil)), 12, 2, .5)
	s := begin(t, newBook(), &Options{Loads: true, Client: client},
		endpoint(t, "p", map[string]string{"loadEvents": b.address()}))
	is(t, s, 3, 2, .5)
	eventually(t, "its events are read, too", func() bool { return s.Counts().Streams == 1 })
}

// What a publisher of libzmq sends, whose queue is as short as SGLang's.
func TestTheLoadOfARealPublisher(t *testing.T) {
	p := startReal(t, map[string]any{"topic": "load", "hwm": 8})
	s := begin(t, newBook(), &Options{Loads: true},
		endpoint(t, "p", map[string]string{"loadEvents": fmt.Sprintf("tcp://127.0.0.1:%d", p.Events)}))
	for frame, requests := range map[string]int{recordedBusy: 4, recordedIdle: 0} {
		eventually(t, frame, func() bool {
			p.say(t, map[string]any{"send": fmt.Sprintf("%x", frame)})
			l := s.Load("p", inspect.Load{})
			return !l.At.IsZero() && l.Running == requests
		})
	}
	assert.Zero(t, s.Counts().Malformed)
}
