// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// faults collects the faults of objects. Each is reported once until it changes or ends.
type faults struct {
	told, now map[string]string // by the object's name
}

func (f *faults) note(object, fault string) {
	if f.now == nil {
		f.now = map[string]string{}
	}
	f.now[object] = fault
}

// news ends a round. It returns the faults that have not been reported: the first one and the number of the others,
// since a mistake in a template gives the same fault for thousands of pods.
func (f *faults) news() error {
	fresh := maps.Clone(f.now)
	maps.DeleteFunc(fresh, func(object, fault string) bool { return f.told[object] == fault })
	f.told, f.now = f.now, nil
	if len(fresh) == 0 {
		return nil
	}
	first := fresh[slices.Min(slices.Collect(maps.Keys(fresh)))]
	if len(fresh) == 1 {
		return fmt.Errorf("kubernetes: left out: %s", first)
	}
	return fmt.Errorf("kubernetes: left out: %s, and %d more", first, len(fresh)-1)
}

// troubles collects the failing calls to the API server.
type troubles struct {
	tell     func(error)
	changed  func()
	patience time.Duration // before a fault of a server that has worked is reported

	mu     sync.Mutex
	calls  map[call]*trouble
	listed bool // by this Watch
	stays  bool // there is a list, maybe of an earlier Watch
}

// call is a call to the API server that is repeated.
type call struct{ verb, resource, namespace string }

func (c call) String() string {
	if c.namespace == "" {
		return c.verb + " " + c.resource
	}
	return fmt.Sprintf("%s %s in namespace %q", c.verb, c.resource, c.namespace)
}

// trouble is the state of a call that fails.
type trouble struct {
	since time.Time
	told  map[string]bool
}

// hear records how a call ended. It reports a failure once for all calls with that failure. While there is a list, it
// reports a failure only after it has lasted for a while, since a server that restarts refuses connections, or does not
// know anybody's rights yet.
func (t *troubles) hear(c call, err error) {
	if told := t.note(c, err); told != nil {
		t.tell(told)
	}
	if err != nil {
		t.changed()
	}
}

func (t *troubles) note(c call, err error) (told error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	text := ""
	if err != nil {
		text = describe(c, err)
	}
	if text == "" {
		delete(t.calls, c)
		return nil
	}
	now, known := t.calls[c]
	if !known {
		now = &trouble{since: time.Now(), told: map[string]bool{}}
		t.calls[c] = now
	}
	if t.listed && time.Since(now.since) < t.patience {
		return nil
	}
	news := true
	for _, each := range t.calls {
		news = news && !each.told[text]
	}
	now.told[text] = true // stays true, since faults may alternate
	switch {
	case !news:
		return nil
	case c.resource == "nodes":
		return fmt.Errorf("kubernetes: %s (zones that only nodes know are missing)", text)
	case t.stays:
		return fmt.Errorf("kubernetes: %s (the last list stays)", text)
	}
	return fmt.Errorf("kubernetes: %s (there is no list yet)", text)
}

func (t *troubles) published() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.listed, t.stays = true, true
}

func (t *troubles) failing(resource string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	for c := range t.calls {
		if c.resource == resource {
			return true
		}
	}
	return false
}

// describe returns a text for an error that stays the same while the fault does, and holds no address. It returns "" if
// the error is no fault, for example that the API server has forgotten an old version.
func describe(c call, err error) string {
	if forgotten(err) {
		return ""
	}
	if apierrors.IsForbidden(err) {
		return fmt.Sprintf("not allowed to %v: see manifests/rbac.yaml", c)
	}
	if apierrors.IsUnauthorized(err) {
		return "the API server does not accept the credentials"
	}
	if status, ok := errors.AsType[*apierrors.StatusError](err); ok {
		code := int(status.Status().Code)
		return fmt.Sprintf("the API server refuses to %v: %d %s", c, code, http.StatusText(code))
	}
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return "the API server does not answer: " + no.Error()
	}
	if _, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "the API server's certificate does not verify"
	}
	failed, ok := errors.AsType[*url.Error](err)
	switch {
	case ok && strings.HasPrefix(failed.Err.Error(), "getting credentials"): // of a program that a kubeconfig names
		return "the credentials cannot be got"
	case ok, errors.Is(err, context.DeadlineExceeded):
		return "the API server does not answer"
	}
	return "what the API server answers makes no sense"
}

// forgotten reports whether the server no longer knows the version, or does not know it yet. The next list is right
// again.
func forgotten(err error) bool {
	return apierrors.IsResourceExpired(err) || apierrors.IsGone(err) ||
		apierrors.HasStatusCause(err, metav1.CauseTypeResourceVersionTooLarge)
}
