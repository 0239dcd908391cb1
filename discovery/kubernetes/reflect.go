// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// After a failed call the reflector pauses before it repeats the call. The pause doubles from the first to the last
// constant, and is at random up to twice as long. client-go's own goes up to a minute, which is too long for a list of
// engines.
const (
	firstPause = 400 * time.Millisecond
	lastPause  = 4 * time.Second
)

// listLimit is for a server that never responds to a list. A working server gives up after a minute.
const listLimit = 90 * time.Second

// clients are the REST clients for one API server. client-go's clientset would compile every API group.
type clients struct {
	http         *http.Client
	core, slices *rest.RESTClient
	codec        runtime.ParameterCodec
}

func newClients(config *rest.Config) (*clients, error) {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme,
		metav1.AddMetaToScheme} {
		if err := add(scheme); err != nil {
			return nil, err
		}
	}
	base := rest.CopyConfig(config)
	base.Timeout = 0
	base.UserAgent = cmp.Or(base.UserAgent, "pdkit")
	if base.QPS == 0 && base.RateLimiter == nil {
		base.QPS = -1 // these few calls have pauses of their own
	}
	base.AcceptContentTypes = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
	base.ContentType = runtime.ContentTypeProtobuf
	base.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	c := &clients{codec: runtime.NewParameterCodec(scheme)}
	var err error
	if c.http, err = rest.HTTPClientFor(base); err != nil {
		return nil, err
	}
	if c.core, err = restClient(base, "/api", corev1.SchemeGroupVersion, c.http); err != nil {
		return nil, err
	}
	c.slices, err = restClient(base, "/apis", discoveryv1.SchemeGroupVersion, c.http)
	return c, err
}

func restClient(base *rest.Config, path string, group schema.GroupVersion, client *http.Client) (*rest.RESTClient,
	error) {
	config := rest.CopyConfig(base)
	config.APIPath, config.GroupVersion = path, &group
	return rest.RESTClientForConfigAndClient(config, client)
}

// closeIdle closes idle connections.
func (c *clients) closeIdle() {
	for transport := c.http.Transport; transport != nil; {
		if t, ok := transport.(interface{ CloseIdleConnections() }); ok {
			t.CloseIdleConnections()
			return
		}
		wrapper, ok := transport.(utilnet.RoundTripperWrapper)
		if !ok {
			return
		}
		transport = wrapper.WrappedRoundTripper()
	}
}

// asked is a resource to list and watch.
type asked struct {
	resource, namespace, selector string

	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
}

func (a asked) call(verb string) call { return call{verb, a.resource, a.namespace} }

func (c *clients) askFor(client *rest.RESTClient, resource, namespace, selector string,
	newList func() runtime.Object) asked {
	get := func(o metav1.ListOptions) *rest.Request {
		// Reflectors repeat calls themselves. The client would repeat them ten times before a fault becomes visible.
		r := client.Get().NamespaceIfScoped(namespace, namespace != "").Resource(resource).VersionedParams(&o,
			c.codec).MaxRetries(0)
		if resource == "nodes" {
			r.SetHeader("Accept", namesAndLabels)
		}
		return r
	}
	return asked{
		resource: resource, namespace: namespace, selector: selector,
		list: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			list := newList()
			return list, get(o).Do(ctx).Into(list)
		},
		watch: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.Watch = true
			return get(o).Watch(ctx)
		},
	}
}

// namesAndLabels asks the server for metadata only. A node object has some ten kilobytes and changes every few minutes,
// but its zone does not. Lists and watches both accept this type.
const namesAndLabels = runtime.ContentTypeProtobuf + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1," +
	runtime.ContentTypeJSON + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

// reflector returns the part of an informer that lists, watches, and does both again after any failure, to keep store
// equal to the server's objects. The rest of an informer would keep whole objects and report each event; here only the
// latest list matters.
func (t *troubles) reflector(a asked, expected runtime.Object, store cache.ReflectorStore) *cache.Reflector {
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.LabelSelector = a.selector
			limited, cancel := context.WithTimeout(ctx, listLimit)
			defer cancel()
			list, err := a.list(limited, o)
			if err != nil && ctx.Err() == nil {
				t.hear(a.call("list"), err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.LabelSelector = a.selector
			events, err := a.watch(ctx, o)
			if err == nil && reflect.TypeOf(events) == silence {
				return nil, errSilence // the reflector lists next, and gets the reason
			}
			if err != nil && o.SendInitialEvents != nil { // the reflector lists next, and gets the reason
				return nil, impatient(err)
			}
			if ctx.Err() == nil {
				t.hear(a.call("watch"), err)
			}
			return events, err
		},
	}
	return cache.NewReflectorWithOptions(source, expected, store, cache.ReflectorOptions{
		Name:    a.resource,
		Logger:  &klog.Logger{}, // without output, since troubles reports all it would say
		Backoff: &wait.Backoff{Duration: firstPause, Cap: lastPause, Steps: 10, Factor: 2, Jitter: 1},
	})
}

// silence is the type of the watch that client-go returns if a watch got no response: a watch that ends at once. A
// reflector takes it for a watch that the server closed. If connections time out, it would then repeat it for ever
// without an error.
var silence = reflect.TypeOf(watch.NewEmptyWatch())

var errSilence = errors.New("the watch was not answered")

// impatient replaces errors after which a reflector that streams its first list would wait without regard to its
// context.
func impatient(err error) error {
	if utilnet.IsConnectionRefused(err) || apierrors.IsTooManyRequests(err) {
		return errors.New(err.Error())
	}
	return err
}
