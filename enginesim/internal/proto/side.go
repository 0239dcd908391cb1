// SPDX-License-Identifier: Apache-2.0

package proto

import (
	"encoding/json"
	"net"
	"time"

	"github.com/pdkit/pdkit/enginesim/internal/core"
)

// side is the side channel of an engine whose blocks others read.
type side struct {
	*PipeServer
	Options
	host   *Host
	Offers offers
}

func (s *side) serve(pipe *core.Pipe) {
	for {
		f, err := pipe.Recv()
		if err != nil || !s.Gate.Pass() || s.answer(pipe, f) != nil {
			return
		}
	}
}

func (s *side) answer(pipe *core.Pipe, f core.Frame) error {
	switch f.Kind {
	case core.FrameHello:
		data, err := json.Marshal(s.host.Hello())
		if err != nil {
			return err
		}
		return pipe.Send(core.Frame{Kind: core.FrameHello, Data: data})
	case core.FrameAsk:
		return s.asked(pipe, f)
	case core.FrameRelease:
		var m RequestMessage
		if err := json.Unmarshal(f.Data, &m); err != nil {
			return err
		}
		if m.Name != "" {
			var known bool
			if m.Request, known = s.Offers.drop(m.Name); !known {
				s.host.Core.Stats.Add(&s.host.Core.Stats.Orphans, 1)
				if s.Left != nil {
					s.Left(m.Name)
				}
				return pipe.Send(core.Frame{Kind: core.FrameReleased, Transfer: f.Transfer})
			}
		}
		if s.host.Core.Unpin(m.Request) {
			s.host.Core.Ledger.Consumed(m.Request)
		} else {
			s.host.Core.Stats.Add(&s.host.Core.Stats.AfterExpiry, 1)
		}
		return pipe.Send(core.Frame{Kind: core.FrameReleased, Transfer: f.Transfer})
	case core.FrameHeartbeat:
		var m RequestMessage
		if err := json.Unmarshal(f.Data, &m); err != nil {
			return err
		}
		s.host.Core.Extend(m.Request)
	}
	return nil
}

// asked gives blocks by their ids at once. It gives blocks by name when somebody has offered them, and does not hold up
// the pipe meanwhile.
func (s *side) asked(pipe *core.Pipe, f core.Frame) error {
	var m AskMessage
	if err := json.Unmarshal(f.Data, &m); err != nil {
		return err
	}
	if m.Name == "" {
		return s.give(pipe, f, m)
	}
	answer := s.GiveOffered
	if s.Named != nil {
		answer = s.Named
	}
	if !s.Go(func() { answer(pipe, f, m) }) {
		return net.ErrClosed
	}
	return nil
}

// GiveOffered gives what somebody has offered under a name, or will offer.
func (s *side) GiveOffered(pipe *core.Pipe, f core.Frame, m AskMessage) {
	if request, ok := s.Await(m.Name); ok {
		s.GiveNamed(pipe, f, m, request)
	}
}

// Await waits until a name is offered and returns the request behind it. ok is false when its reader leaves first, or
// the engine ends.
func (s *side) Await(name string) (request string, ok bool) {
	request, soon := s.Offers.Get(name)
	if soon == nil {
		return request, true
	}
	select {
	case <-soon:
		request, soon = s.Offers.Get(name)
		return request, soon == nil
	case <-s.Gate.Ended:
		return "", false
	}
}

// Forget takes back what is offered under a name, and lets go of its blocks.
func (s *side) Forget(name string) {
	if request, ok := s.Offers.drop(name); ok && s.host.Core.Unpin(request) {
		s.host.Core.Ledger.Consumed(request)
	}
}

// Refuse answers an ask that is not served.
func Refuse(pipe *core.Pipe, f core.Frame) {
	_ = pipe.Send(core.Frame{Kind: core.FrameError, Transfer: f.Transfer, Key: f.Key})
}

// GiveNamed gives what a request has offered.
func (s *side) GiveNamed(pipe *core.Pipe, f core.Frame, m AskMessage, request string) {
	blocks, _, known := s.host.Core.Leased(request)
	if !known || m.First < 0 || m.Count < 0 || m.First+m.Count > len(blocks) {
		Refuse(pipe, f)
		return
	}
	m.Request = request
	for _, id := range blocks[m.First : m.First+m.Count] {
		m.Blocks = append(m.Blocks, int64(id))
	}
	if s.Writes {
		// It counts them before it sends them: whoever reads the counters after the reader has answered must find them.
		s.host.Core.Stats.Transferred(len(m.Blocks)*s.host.Core.BlockBytes, len(m.Blocks), time.Millisecond)
	}
	_ = s.give(pipe, f, m)
}

// give sends blocks as they are in memory now. Like a remote read, it checks neither whose they are nor whether the
// lease still holds. The ledger notes both.
func (s *side) give(pipe *core.Pipe, f core.Frame, m AskMessage) error {
	kv := s.host.Core
	ids := make([]int32, len(m.Blocks))
	for i, id := range m.Blocks {
		if id < 0 || id > int64(kv.Blocks()) {
			return pipe.Send(core.Frame{Kind: core.FrameError, Transfer: f.Transfer, Key: f.Key})
		}
		ids[i] = int32(id)
	}
	blocks, prompt, known := kv.Leased(m.Request)
	if m.Name != "" && !known { // who asked has left meanwhile, and has let go of them
		Refuse(pipe, f)
		return nil
	}
	kv.Ledger.Read(m.Request, ids, f.Key, blocks, prompt, known)
	const atOnce = 64
	for first := 0; first < len(ids); first += atOnce {
		if !s.Gate.Pass() {
			return net.ErrClosed
		}
		contents := kv.Read(ids[first:min(first+atOnce, len(ids))])
		frames := make([]core.Frame, len(contents))
		for i, content := range contents {
			frames[i] = core.Frame{Kind: core.FrameBlock, Transfer: f.Transfer, Key: f.Key, Index: uint32(first + i),
				Count: uint32(len(ids)), Data: content}
		}
		if err := pipe.Send(frames...); err != nil {
			return err
		}
	}
	return nil
}
