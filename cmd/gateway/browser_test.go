// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// browser is Chromium with one page, driven by the DevTools protocol over a pipe: messages of JSON that end with a zero
// byte (chromium --remote-debugging-pipe).
type browser struct {
	t       *testing.T
	in      *os.File
	out     *bufio.Reader
	id      int
	session string
	bad     []string // what the page's scripts and its security policy complained of
}

// message is a response or an event of the protocol.
type message struct {
	ID     int
	Method string
	Params json.RawMessage
	Result json.RawMessage
	Error  *struct{ Message string }
}

// chromium is the browser's program, which must be installed in CI. Tests that need it are skipped elsewhere.
func chromium(t *testing.T) string {
	t.Helper()
	program, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal("cmd/gateway/live/install.sh has not been run: ", err)
		}
		t.Skip("Chromium is not installed: run cmd/gateway/live/install.sh")
	}
	return program
}

// openBrowser opens a page in Chromium.
func openBrowser(t *testing.T, url string, width, height int, phone, dark bool) *browser {
	t.Helper()
	program := chromium(t)
	read, in, err := os.Pipe()
	require.NoError(t, err)
	out, write, err := os.Pipe()
	require.NoError(t, err)
	// of its own: the test's folder cannot be removed while helpers of the browser still write to it
	profile, err := os.MkdirTemp("", "chromium") //nolint:usetesting // see above
	require.NoError(t, err)
	cmd := exec.CommandContext(context.Background(), program, "--headless=new", "--no-sandbox", "--disable-gpu",
		"--disable-dev-shm-usage", "--hide-scrollbars", "--user-data-dir="+profile, "--remote-debugging-pipe",
		"about:blank")
	cmd.ExtraFiles = []*os.File{read, write} // 3 and 4, as the flag has it
	require.NoError(t, cmd.Start())
	_, _ = read.Close(), write.Close()
	require.NoError(t, out.SetReadDeadline(time.Now().Add(2*time.Minute)))
	b := &browser{t: t, in: in, out: bufio.NewReaderSize(out, 1<<20)}
	t.Cleanup(func() {
		_, _ = in.WriteString(`{"id":0,"method":"Browser.close"}` + "\x00")
		kill := time.AfterFunc(10*time.Second, func() { _ = cmd.Process.Kill() })
		_ = cmd.Wait()
		kill.Stop()
		_, _ = in.Close(), out.Close()
		for range 50 { // its helpers write until they end, which is a little later
			if os.RemoveAll(profile) == nil {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		require.Empty(t, b.bad, "the page complains")
	})
	var target struct{ TargetID, SessionID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target)
	b.session = target.SessionID
	for _, part := range []string{"Page", "Runtime", "Log"} {
		b.call(part+".enable", nil, nil)
	}
	scale, scheme := 1, "light"
	if phone {
		scale = 2
	}
	if dark {
		scheme = "dark"
	}
	b.call("Emulation.setDeviceMetricsOverride", map[string]any{"width": width, "height": height,
		"deviceScaleFactor": scale, "mobile": phone}, nil)
	b.call("Emulation.setEmulatedMedia", map[string]any{"features": []map[string]string{
		{"name": "prefers-color-scheme", "value": scheme}}}, nil)
	b.call("Page.navigate", map[string]any{"url": url}, nil)
	return b
}

// call asks the browser, and reads its response into result unless that is nil.
func (b *browser) call(method string, params map[string]any, result any) {
	b.t.Helper()
	b.id++
	m := map[string]any{"id": b.id, "method": method}
	if params != nil {
		m["params"] = params
	}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	body, err := json.Marshal(m)
	require.NoError(b.t, err)
	_, err = b.in.Write(append(body, 0))
	require.NoError(b.t, err)
	for {
		line, err := b.out.ReadBytes(0)
		require.NoError(b.t, err, method)
		var got message
		require.NoError(b.t, json.Unmarshal(line[:len(line)-1], &got))
		switch {
		case got.ID == b.id:
			require.Nil(b.t, got.Error, "%s: %+v", method, got.Error)
			if result != nil {
				require.NoError(b.t, json.Unmarshal(got.Result, result))
			}
			return
		case got.Method == "Runtime.exceptionThrown", got.Method == "Runtime.consoleAPICalled",
			got.Method == "Log.entryAdded":
			b.bad = append(b.bad, string(got.Params))
		}
	}
}

// eval returns the value of a JavaScript expression. The protocol may run scripts that the page's policy forbids.
func eval[T any](b *browser, expression string) T {
	b.t.Helper()
	var got struct {
		Result           struct{ Value T }
		ExceptionDetails json.RawMessage
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &got)
	require.Nil(b.t, got.ExceptionDetails, "%s: %s", expression, got.ExceptionDetails)
	return got.Result.Value
}

// until waits until a JavaScript expression is true.
func (b *browser) until(expression string) {
	b.t.Helper()
	require.Eventually(b.t, func() bool { return eval[bool](b, expression) }, 20*time.Second, 50*time.Millisecond,
		expression)
}

var keyCodes = map[string]int{"Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36, "ArrowUp": 38,
	"ArrowDown": 40}

// press presses a key as a person does. A letter is itself.
func (b *browser) press(key string) {
	b.t.Helper()
	event := map[string]any{"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": keyCodes[key]}
	switch {
	case len(key) == 1:
		event["text"], event["code"] = key, "Key"+strings.ToUpper(key)
		event["windowsVirtualKeyCode"] = int(strings.ToUpper(key)[0])
	case key == "Enter":
		event["text"] = "\r"
	}
	b.call("Input.dispatchKeyEvent", event, nil)
	event["type"] = "keyUp"
	delete(event, "text")
	b.call("Input.dispatchKeyEvent", event, nil)
}

// picture returns what the window shows, as PNG.
func (b *browser) picture() []byte {
	b.t.Helper()
	var shot struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	data, err := base64.StdEncoding.DecodeString(shot.Data)
	require.NoError(b.t, err)
	return data
}

// node is one node of the accessibility tree: what a screen reader meets.
type node struct {
	Ignored    bool
	Role, Name struct{ Value string }
}

func (n node) String() string { return fmt.Sprintf("%s %q", n.Role.Value, n.Name.Value) }

// nodes lists what a screen reader meets.
func (b *browser) nodes() (all []node) {
	b.t.Helper()
	var tree struct {
		Nodes []struct {
			Ignored bool
			Role    struct{ Value any }
			Name    struct{ Value any }
		}
	}
	b.call("Accessibility.getFullAXTree", nil, &tree)
	for _, x := range tree.Nodes {
		if x.Ignored {
			continue
		}
		n := node{}
		n.Role.Value, _ = x.Role.Value.(string)
		n.Name.Value, _ = x.Name.Value.(string)
		all = append(all, n)
	}
	return all
}
