// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/pdkit/pdkit/discovery"
	"github.com/pdkit/pdkit/discovery/discoverytest"
)

// seen collects the lists and the errors of a source.
type seen struct {
	mu     sync.Mutex
	lists  []discovery.Snapshot
	errors []string
	news   chan struct{}
}

func (s *seen) publish(snap discovery.Snapshot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lists = append(s.lists, snap)
	close(s.news)
	s.news = make(chan struct{})
}

func (s *seen) onError(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errors = append(s.errors, err.Error())
	close(s.news)
	s.news = make(chan struct{})
}

func (s *seen) told() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.errors)
}

func (s *seen) published() []discovery.Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.lists)
}

// until waits until ok.
func (s *seen) until(t testing.TB, ok func() bool, what string) {
	t.Helper()
	timeout := time.After(2 * time.Minute)
	again := time.NewTicker(pace)
	defer again.Stop()
	for {
		s.mu.Lock()
		news := s.news
		s.mu.Unlock()
		if ok() {
			return
		}
		select {
		case <-news:
		case <-again.C: // what the fake server has counted
		case <-timeout:
			t.Fatalf("not seen: %s\nlists: %v\nerrors: %q", what, s.published(), s.told())
		}
	}
}

// list waits until the latest list is this one.
func (s *seen) list(t testing.TB, lines ...string) {
	t.Helper()
	want := strings.Join(lines, "\n")
	s.until(t, func() bool {
		lists := s.published()
		return len(lists) > 0 && told(lists[len(lists)-1].Endpoints) == want
	}, want)
}

func (s *seen) fault(t testing.TB, want string) {
	t.Helper()
	s.until(t, func() bool { return slices.Contains(s.told(), want) }, want)
}

// look watches a source with these options until the end of the test. The patience with a server that has worked is
// short, if any.
func look(t testing.TB, o Options, patience time.Duration) *seen {
	t.Helper()
	s := &seen{news: make(chan struct{})}
	o.OnError = s.onError
	source, err := New(&o)
	require.NoError(t, err)
	source.patience = patience
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- source.Watch(ctx, s.publish) }()
	t.Cleanup(func() {
		cancel()
		assert.NoError(t, <-done)
	})
	return s
}

func llmPods(f *fakeAPI) Options {
	return Options{Config: f.config(), Selector: Selector{MatchLabels: map[string]string{"app": "llm"}}}
}

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	config := &rest.Config{}
	llm := Selector{MatchLabels: map[string]string{"app": "llm"}}
	for want, o := range map[string]*Options{
		"kubernetes: Config is missing": nil,
		"kubernetes: nothing to look for is given: want Selector.MatchLabels, Selector.PDGroup or Services": {
			Config: config,
		},
		"kubernetes: Cluster contains a slash": {Config: config,
			Selector: llm, Cluster: "a/b"},
		"kubernetes: Namespace is not the name of a namespace": {Config: config,
			Selector: llm, Namespace: "../x"},
		"kubernetes: Scheme is not http or https": {Config: config,
			Selector: llm, Scheme: "ftp"},
		"kubernetes: Ports are not ports from 1 to 65535, each once, or there is a Port, too": {Config: config,
			Selector: llm, Ports: []int{8000, 8000}},
		"kubernetes: Port is neither one of 1 to 65535 nor the name of a port": {Config: config,
			Selector: llm, Port: "70000"},
		"kubernetes: Selector.MatchLabels has an entry that is not a label": {Config: config,
			Selector: Selector{MatchLabels: map[string]string{"a b": "c"}}},
		"kubernetes: Selector.PDGroup has no labels: no pod would have a role": {Config: config,
			Selector: Selector{PDGroup: &PDGroup{GroupKey: "g"}}},
		"kubernetes: Selector.PDGroup.GroupKey is not the key of a label": {Config: config,
			Selector: Selector{PDGroup: &PDGroup{GroupKey: "-", PrefillLabels: llm.MatchLabels}}},
		"kubernetes: Selector.PDGroup.DecodeLabels has an entry that is not a label": {Config: config,
			Selector: Selector{PDGroup: &PDGroup{DecodeLabels: map[string]string{"a": "b c"}}}},
		`kubernetes: Services: "A" is not the name of a service`: {Config: config,
			Services: []Service{{Name: "A"}}},
		`kubernetes: Services: "a" is given twice`: {Config: config,
			Services: []Service{{Name: "a"}, {Name: "a"}}},
		`kubernetes: Services: "a": role "role(5)" is not one of prefill, decode, both, encode`: {Config: config,
			Services: []Service{{Name: "a", Role: 5}}},
		"kubernetes: Config: unable to load root certificates: unable to parse bytes as PEM block": {
			Config: &rest.Config{TLSClientConfig: rest.TLSClientConfig{CAData: []byte("x")}}, Selector: llm,
		},
	} {
		_, err := New(o)
		assert.EqualError(t, err, want)
	}
}

func TestOptionsAreCopied(t *testing.T) {
	f := newFakeAPI(t)
	f.put(enginePod(), enginePod(named("p-1"), labelled("app", "web")))
	o := llmPods(f)
	o.Attributes = map[string]string{"a": "1"}
	s := look(t, o, 0)
	o.Selector.MatchLabels["app"], o.Attributes["a"], o.Config.Host = "web", "2", "x"
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready a:1")
}

func TestSourceKeepsTheRules(t *testing.T) {
	for name, noStream := range map[string]bool{"streamed lists": false, "an older server": true} {
		t.Run(name, func(t *testing.T) {
			discoverytest.Run(
				t, fakeHarness(t, noStream, llmPods, func(i int, change ...func(*corev1.Pod)) []metav1.Object {
					return []metav1.Object{enginePod(append(change, named(fmt.Sprintf("p-%d", i)))...)}
				}))
		})
	}
}

func TestSourceOfServicesKeepsTheRules(t *testing.T) {
	options := func(f *fakeAPI) Options {
		return Options{Config: f.config(), Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}
	}
	discoverytest.Run(t, fakeHarness(t, false, options, func(i int, change ...func(*corev1.Pod)) []metav1.Object {
		p := enginePod(append(change, named(fmt.Sprintf("p-%d", i)))...)
		conditions := isReady
		if p.DeletionTimestamp != nil {
			conditions = isTerminating
		}
		return []metav1.Object{endpointSlice(fmt.Sprintf("s-%d", i), of(p.Name, "10.0.0.1", conditions))}
	}))
}

// noted is a source whose lists are kept, too.
type noted struct {
	discovery.Source
	*seen
}

func note(source discovery.Source) noted {
	return noted{source, &seen{news: make(chan struct{})}}
}

func (n noted) Watch(ctx context.Context, publish func(discovery.Snapshot)) error {
	return n.Source.Watch(ctx, func(snap discovery.Snapshot) {
		publish(snap)
		n.seen.publish(snap)
	})
}

// drains waits until an engine is published as draining.
func (n noted) drains(t testing.TB, id string) {
	t.Helper()
	n.until(t, func() bool {
		return slices.ContainsFunc(n.published(), func(snap discovery.Snapshot) bool {
			return slices.ContainsFunc(snap.Endpoints, func(e discovery.Endpoint) bool {
				return e.ID == id && e.Phase == discovery.PhaseDraining
			})
		})
	}, id+" drains")
}

// fakeHarness makes engines by number, each of some objects.
func fakeHarness(t *testing.T, noStream bool, options func(*fakeAPI) Options,
	engine func(i int, change ...func(*corev1.Pod)) []metav1.Object) discoverytest.Harness {
	var f *fakeAPI
	var under noted
	made := 0
	add := func() error {
		made++
		f.put(engine(made)...)
		return nil
	}
	return discoverytest.Harness{
		New: func() discovery.Source {
			f = newFakeAPI(t)
			f.noStream = noStream
			_, _ = add(), add()
			o := options(f)
			source, err := New(&o)
			require.NoError(t, err)
			under = note(source)
			return under
		},
		Change: add,
		Break: func() error {
			f.refusing(func(string, string) int { return -1 })
			f.endWatches(true)
			return nil
		},
		Repair: func() error { f.refusing(nil); return nil },
		Remove: func() (string, error) {
			id := fmt.Sprintf("default/p-%d", made)
			f.put(engine(made, deleted)...)
			under.drains(t, id) // and is not overtaken by its end
			for _, o := range engine(made) {
				f.remove(o)
			}
			return id, nil
		},
		Timeout: 30 * time.Second,
	}
}

func TestOneWatchAtATime(t *testing.T) {
	o := llmPods(newFakeAPI(t))
	source, err := New(&o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	s := &seen{news: make(chan struct{})}
	done := make(chan error)
	go func() { done <- source.Watch(ctx, s.publish) }()
	s.list(t, "")
	assert.EqualError(t, source.Watch(ctx, s.publish), "kubernetes: the source is being watched already")
	cancel()
	require.NoError(t, <-done)
}

func TestWhatChangesNothingIsNotPublished(t *testing.T) {
	f := newFakeAPI(t)
	f.put(enginePod())
	s := look(t, llmPods(f), 0)
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready")
	f.put(enginePod(annotated("other.example/x", "y")), enginePod(func(p *corev1.Pod) { p.Status.Message = "x" }))
	f.endWatches(true) // a whole list, too
	f.put(enginePod(unready))
	s.list(t, "default/p-0 http://10.0.0.1:8000 both not-ready")
	assert.Len(t, s.published(), 2)
}

func TestABurstIsOneList(t *testing.T) {
	f := newFakeAPI(t)
	s := look(t, llmPods(f), 0)
	s.list(t, "")
	const pods = 500
	began := time.Now()
	for i := range pods {
		f.put(enginePod(named(fmt.Sprintf("p-%03d", i))))
	}
	s.until(t, func() bool {
		lists := s.published()
		return len(lists[len(lists)-1].Endpoints) == pods
	}, "all pods")
	most := 3 + int(time.Since(began)/(20*time.Millisecond))
	assert.LessOrEqual(t, len(s.published()), most)
}

func TestRightsThatAreMissingAreTold(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.put(enginePod())
	refused := func(calls ...string) func(verb, resource string) int {
		return func(verb, resource string) int {
			if slices.Contains(calls, verb+" "+resource) {
				return 403
			}
			return 0
		}
	}
	f.refusing(refused("list pods", "watch pods"))
	s := look(t, llmPods(f), 0)
	s.fault(t, denied("list pods", "default", "there is no list yet"))
	assert.Empty(t, s.published())

	f.refusing(refused("watch pods")) // which a list does not make good
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready")
	s.until(t, func() bool { // before the list is published, which takes a moment, or after that
		told := s.told()
		return strings.HasPrefix(told[len(told)-1],
			`kubernetes: not allowed to watch pods in namespace "default": see manifests/rbac.yaml (the`)
	}, "the fault")
	before := f.count("list pods")
	s.until(t, func() bool { return f.count("list pods") > before }, "another try")

	f.refusing(nil)
	f.put(enginePod(unready))
	s.list(t, "default/p-0 http://10.0.0.1:8000 both not-ready")
	assert.Len(t, s.told(), 2, "each once")
}

func TestRefusedNodesCostZonesAlone(t *testing.T) {
	f := newFakeAPI(t)
	f.put(enginePod(onNode))
	f.refusing(func(_, resource string) int { return map[string]int{"nodes": 403}[resource] })
	o := llmPods(f)
	o.Nodes = true
	s := look(t, o, 0)
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready node=n1")
	s.fault(t, "kubernetes: not allowed to list nodes: see manifests/rbac.yaml (zones that only nodes know are "+
		"missing)")

	f.put(
		&metav1.PartialObjectMetadata{
			ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{zoneLabel: "z1"}},
		},
	)
	f.refusing(nil)
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready zone=z1 node=n1")
}

func TestFaultsOfTheServerAreNamed(t *testing.T) {
	for status, want := range map[int]string{
		401: "kubernetes: the API server does not accept the credentials (there is no list yet)",
		404: `kubernetes: the API server refuses to list pods in namespace "default": 404 Not Found (there is no ` +
			`list yet)`,
		503: `kubernetes: the API server refuses to list pods in namespace "default": 503 Service Unavailable (there ` +
			`is no list yet)`,
		-1:  "kubernetes: the API server does not answer: connection reset by peer (there is no list yet)",
		200: "kubernetes: what the API server answers makes no sense (there is no list yet)",
	} {
		t.Run(want, func(t *testing.T) {
			t.Parallel()
			f := newFakeAPI(t)
			f.refusing(func(string, string) int { return status })
			s := look(t, llmPods(f), 0)
			s.fault(t, want)
		})
	}
}

func TestAnOutageIsToldOnceAndEmptiesNothing(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.put(enginePod(), endpointSlice("s1", of("p-0", "10.0.0.1", isReady)))
	o := llmPods(f)
	o.Services = []Service{{Name: "prefill"}}
	s := look(t, o, time.Nanosecond)
	s.list(t, "default/p-0 http://10.0.0.1:8100 both ready")
	f.put(enginePod(annotated("x", "y"))) // a watch that has heard nothing yet would be given up, and not taken up
	time.Sleep(2 * time.Second)           // and so would one that is not yet a second old
	f.refusing(func(string, string) int { return -1 })
	f.endWatches(false)
	const fault = "kubernetes: the API server does not answer: connection reset by peer (the last list stays)"
	s.fault(t, fault)
	before := f.count("list pods") + f.count("list endpointslices")
	s.until(t, func() bool { return f.count("list pods")+f.count("list endpointslices") > before+2 }, "other tries")
	assert.Equal(t, []string{fault}, s.told(), "two resources, many tries, one fault")
	assert.Len(t, s.published(), 1)

	f.put(enginePod(deleted))
	f.refusing(nil)
	s.list(t, "default/p-0 http://10.0.0.1:8100 both draining")
	f.put(endpointSlice("s1", of("p-0", "10.0.0.2", isReady)))
	s.list(t, "default/p-0 http://10.0.0.2:8100 both draining")

	f.refusing(func(string, string) int { return -1 })
	f.endWatches(false)
	s.until(t, func() bool { return len(s.told()) > 1 }, "another outage")
	assert.Equal(t, []string{fault, fault}, s.told())
}

// A watch that gets no response, as where packets are lost, looks to client-go like one that the server has ended.
func TestAWatchThatIsNotAnsweredIsNotTakenForOne(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	s := look(t, llmPods(f), time.Nanosecond)
	s.list(t, "")
	f.put(enginePod())
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready")
	f.refusing(func(string, string) int { return -2 })
	f.endWatches(false)
	s.fault(t, "kubernetes: the API server does not answer: connection reset by peer (the last list stays)")
}

func TestWhatPassesIsNotTold(t *testing.T) {
	t.Parallel()
	f := newFakeAPI(t)
	f.put(enginePod())
	s := look(t, llmPods(f), time.Hour)
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready")
	f.endWatches(false) // as servers do every few minutes
	f.put(enginePod(unready))
	s.list(t, "default/p-0 http://10.0.0.1:8000 both not-ready")
	f.endWatches(true) // 410 for who would go on from before
	f.put(enginePod())
	s.list(t, "default/p-0 http://10.0.0.1:8000 both ready")
	f.refusing(func(string, string) int { return 503 }) // a restart
	f.endWatches(true)
	before := f.count("list pods")
	s.until(t, func() bool { return f.count("list pods") > before }, "a try")
	f.put(enginePod(deleted))
	f.refusing(nil)
	s.list(t, "default/p-0 http://10.0.0.1:8000 both draining")
	assert.Empty(t, s.told())
	for _, snap := range s.published() {
		assert.NotEmpty(t, snap.Endpoints)
	}
}

func TestAPodThatLosesItsPortIsToldAndComesBack(t *testing.T) {
	f := newFakeAPI(t)
	o := llmPods(f)
	o.Port = "api"
	f.put(enginePod(named("a"), withPort("api", 1)), enginePod(named("b"), withPort("api", 2)))
	s := look(t, o, 0)
	s.list(t, "default/a http://10.0.0.1:1 both ready", "default/b http://10.0.0.1:2 both ready")
	f.put(enginePod(named("b")))
	s.list(t, "default/a http://10.0.0.1:1 both ready")
	s.fault(t, `kubernetes: left out: pod "b": no port of its containers is named "api"`)
	f.put(enginePod(named("b"), withPort("api", 3)))
	s.list(t, "default/a http://10.0.0.1:1 both ready", "default/b http://10.0.0.1:3 both ready")
}

func TestPodsAreNotReadWhereServicesSayTheRole(t *testing.T) {
	f := newFakeAPI(t)
	f.put(endpointSlice("s1", of("p-0", "10.0.0.1", isReady)))
	s := look(t, Options{Config: f.config(), Services: []Service{{Name: "prefill", Role: discovery.RolePrefill}}}, 0)
	s.list(t, "default/p-0 http://10.0.0.1:8100 prefill ready")
	assert.Zero(t, f.count("list pods")+f.count("watch pods"))
}

func TestTheServerChoosesThePods(t *testing.T) {
	f := newFakeAPI(t)
	o := llmPods(f)
	o.Selector.PDGroup = byRole
	f.put(enginePod(), enginePod(named("p-1"), labelled("group", "")), enginePod(named("p-2"), labelled("app", "web")))
	s := look(t, o, 0)
	s.list(t, "default/p-0 http://10.0.0.1:8000 prefill ready group=a")
	f.put(enginePod(named("p-1")))
	s.list(t, "default/p-0 http://10.0.0.1:8000 prefill ready group=a",
		"default/p-1 http://10.0.0.1:8000 prefill ready group=a")
	f.put(enginePod(named("p-1"), labelled("app", "web")))
	s.list(t, "default/p-0 http://10.0.0.1:8000 prefill ready group=a")
	source, err := New(&o)
	require.NoError(t, err)
	assert.Equal(t, "app=llm,group", source.pods)
	assert.Zero(t, f.count("list pods"), "they come as a stream")
}

func TestTwoClustersAreTwoSourcesOfOneSet(t *testing.T) {
	var sources []discovery.Source
	for _, cluster := range []string{"east", "west"} {
		f := newFakeAPI(t)
		f.put(enginePod(), enginePod(named("d-0"), labelled("role", "decode")))
		o := llmPods(f)
		o.Cluster, o.Selector.PDGroup = cluster, byRole
		source, err := New(&o)
		require.NoError(t, err)
		sources = append(sources, source)
	}
	set := discovery.NewSet(sources...)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- set.Run(ctx) }()
	require.NoError(t, set.WaitReady(ctx, func(s *discovery.Snapshot) bool { return len(s.Endpoints) == 4 }))
	assert.Equal(t, `east/default/d-0 http://10.0.0.1:8000 decode ready group=east/a
east/default/p-0 http://10.0.0.1:8000 prefill ready group=east/a
west/default/d-0 http://10.0.0.1:8000 decode ready group=west/a
west/default/p-0 http://10.0.0.1:8000 prefill ready group=west/a`, told(set.Load().Endpoints),
		"no engine is in a group of the other cluster")
	cancel()
	require.NoError(t, <-done)
}
