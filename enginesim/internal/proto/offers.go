// SPDX-License-Identifier: Apache-2.0

package proto

import "sync"

// offers are the names under which a side gives KV, and who waits for one.
type offers struct {
	mu      sync.Mutex
	ready   map[string]string // name to request
	waiting map[string]chan struct{}
}

// Put makes a name known. A later offer wins, since an id may be used again once its first pair is done.
func (o *offers) Put(name, request string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ready == nil {
		o.ready = map[string]string{}
	}
	o.ready[name] = request
	if ch := o.waiting[name]; ch != nil {
		close(ch)
		delete(o.waiting, name)
	}
}

// Get gives the request behind a name, or a channel that closes when there is one.
func (o *offers) Get(name string) (request string, soon <-chan struct{}) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if request, ok := o.ready[name]; ok {
		return request, nil
	}
	if o.waiting == nil {
		o.waiting = map[string]chan struct{}{}
	}
	if o.waiting[name] == nil {
		o.waiting[name] = make(chan struct{})
	}
	return "", o.waiting[name]
}

// drop forgets a name, and returns the request behind it, if there was one. Readers that wait for it get nothing.
func (o *offers) drop(name string) (request string, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	request, ok = o.ready[name]
	delete(o.ready, name)
	if ch := o.waiting[name]; ch != nil {
		close(ch)
		delete(o.waiting, name)
	}
	return request, ok
}
