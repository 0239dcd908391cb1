// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A wire joins hosts, each a network namespace with an interface whose packets this process carries. So it can lose,
// delay, reorder or stop the packets of two hosts while both reach everybody else. Nothing of it leaves the machine:
// the namespaces have no other interface but their own loopback.
type wire struct {
	mu    sync.RWMutex
	hosts map[netip.Addr]*host
	rules map[[2]netip.Addr]rule // by source and destination
}

// rule is what happens to packets from one host to another.
type rule struct {
	cut           bool
	lose          float64       // share
	delay, jitter time.Duration // jitter is at most that much more, by chance: it lets packets overtake each other
}

// host is a namespace of a wire.
type host struct {
	addr netip.Addr
	tun  *os.File
	ns   *os.File
}

const wirePrefix = "10.77.0."

// hasNamespace is the environment variable that tells this program that it has a namespace of its own already.
const hasNamespace = "PDKIT_RELIABILITY_NAMESPACE"

// inNamespace runs this program again in a network namespace of its own, where it may make others. It returns
// errNoNamespace where that is not allowed.
func inNamespace() error {
	if os.Getenv(hasNamespace) != "" {
		return nil
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	attr := &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if uid := os.Getuid(); uid != 0 {
		attr.Cloneflags |= syscall.CLONE_NEWUSER
		attr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: uid, Size: 1}}
		attr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	probe := exec.Command(self, "namespace")
	probe.SysProcAttr = attr
	probe.Env = append(os.Environ(), hasNamespace+"=1")
	if text, err := probe.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %w %s", errNoNamespace, err, text)
	}
	again := exec.Command(self, os.Args[1:]...) // it gets this process's signals itself
	again.SysProcAttr = attr
	again.Env = probe.Env
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	runtime.LockOSThread() // the child is told when this thread ends
	err = again.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		os.Exit(max(exit.ExitCode(), 1))
	}
	if err == nil {
		os.Exit(0)
	}
	return err
}

// newWire makes a wire and puts this process on it, as host 1.
func newWire() (*wire, error) {
	w := &wire{hosts: map[netip.Addr]*host{}, rules: map[[2]netip.Addr]rule{}}
	tun, err := plug(wirePrefix + "1")
	if err != nil {
		return nil, err
	}
	w.add(&host{addr: netip.MustParseAddr(wirePrefix + "1"), tun: tun})
	return w, nil
}

// host adds a host with that number.
func (w *wire) host(number int) (*host, error) {
	h := &host{addr: netip.MustParseAddr(fmt.Sprint(wirePrefix, number))}
	done := make(chan error, 1)
	go func() {
		// The thread keeps the new namespace, so it ends with this goroutine: it is never unlocked.
		runtime.LockOSThread()
		done <- func() (err error) {
			if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return fmt.Errorf("a namespace for an engine: %w", err)
			}
			if h.tun, err = plug(h.addr.String()); err != nil {
				return err
			}
			h.ns, err = os.Open("/proc/thread-self/ns/net")
			return err
		}()
	}()
	if err := <-done; err != nil {
		return nil, err
	}
	w.add(h)
	return h, nil
}

// start starts a process on the host.
func (h *host) start(cmd *exec.Cmd) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked, as in host
		if err := unix.Setns(int(h.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- err
			return
		}
		done <- cmd.Start()
	}()
	return <-done
}

// plug gives the calling thread's namespace a loopback and an interface with an address, whose packets the file has.
func plug(address string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	control, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	defer unix.Close(control)
	set := func(request uint, fd int, name string, change func(*unix.Ifreq) error) {
		if err != nil {
			return
		}
		var r *unix.Ifreq
		if r, err = unix.NewIfreq(name); err != nil {
			return
		}
		if err = change(r); err == nil {
			err = unix.IoctlIfreq(fd, request, r)
		}
	}
	up := func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING); return nil }
	addr := netip.MustParseAddr(address).As4()
	const name = "wire"
	set(unix.TUNSETIFF, fd, name, func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI); return nil })
	set(unix.SIOCSIFFLAGS, control, "lo", up)
	set(unix.SIOCSIFADDR, control, name, func(r *unix.Ifreq) error { return r.SetInet4Addr(addr[:]) })
	mask := []byte{255, 255, 255, 0}
	set(unix.SIOCSIFNETMASK, control, name, func(r *unix.Ifreq) error { return r.SetInet4Addr(mask) })
	set(unix.SIOCSIFFLAGS, control, name, up)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("an interface for %s: %w", address, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), name), nil
}

func (w *wire) add(h *host) {
	w.mu.Lock()
	w.hosts[h.addr] = h
	w.mu.Unlock()
	go w.carry(h)
}

// carry takes the packets of a host to their destinations, until the wire is closed.
func (w *wire) carry(h *host) {
	buf := make([]byte, 2048)
	for {
		n, err := h.tun.Read(buf)
		if err != nil {
			return
		}
		if n < 20 || buf[0]>>4 != 4 {
			continue // IPv6's own chatter
		}
		to := netip.AddrFrom4([4]byte(buf[16:20]))
		w.mu.RLock()
		dest, r := w.hosts[to], w.rules[[2]netip.Addr{h.addr, to}]
		w.mu.RUnlock()
		switch {
		case dest == nil || r.cut || r.lose > 0 && rand.Float64() < r.lose:
		case r.delay+r.jitter > 0:
			packet := append([]byte(nil), buf[:n]...)
			wait := r.delay
			if r.jitter > 0 {
				wait += rand.N(r.jitter)
			}
			time.AfterFunc(wait, func() { _, _ = dest.tun.Write(packet) })
		default:
			_, _ = dest.tun.Write(buf[:n])
		}
	}
}

// between sets what happens to packets between two hosts, in both directions.
func (w *wire) between(a, b netip.Addr, r rule) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rules[[2]netip.Addr{a, b}], w.rules[[2]netip.Addr{b, a}] = r, r
}

func (w *wire) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, h := range w.hosts {
		_ = h.tun.Close()
		if h.ns != nil {
			_ = h.ns.Close()
		}
	}
}
