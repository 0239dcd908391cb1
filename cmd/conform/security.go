// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/pdkit/pdkit/enginesim"
)

// securityCases are about clients that mean harm, or send nonsense.
var securityCases = []Case{
	{ID: "security/transfer-members", Severity: Must, Check: ownTransfer,
		Rule: "A client's own kv_transfer_params reach no engine: they would read another request's KV, or make an " +
			"engine connect where the client wants."},
	{ID: "security/transfer-members-twice", Severity: Must, Check: ownTransferTwice,
		Rule: "The same where the member is written twice, or with escapes in its name."},
	{ID: "security/engine-addresses", Severity: Should, Check: addresses,
		Rule: "Errors do not tell the engines' addresses."},
	{ID: "security/two-lengths", Severity: Must, Check: smuggle("Content-Length: 0\r\nContent-Length: %d\r\n\r\n%s"),
		Rule: "A request with two values of Content-Length is refused: what the second hides is no request."},
	{ID: "security/length-and-chunks", Severity: Should,
		Check: smuggle("Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n%s"),
		Rule: "After a request with Content-Length and Transfer-Encoding the connection is closed (RFC 9112, section " +
			"6.1): what follows is no request."},
	{ID: "security/large-body", Severity: Should, Check: large,
		Rule: "A body of 10 GB is refused before it is read."},
	{ID: "security/deep-json", Severity: Must, Check: odd(func() string {
		return strings.Replace(body("x", "@"), `"@"`, strings.Repeat("[", 200000)+strings.Repeat("]", 200000), 1)
	}, false), Rule: "A body that is nested 200,000 deep gets an answer, and the gateway lives on."},
	{ID: "security/not-json", Severity: Should, Check: odd(func() string { return `{"model":"tiny","prompt":` }, true),
		Rule: "A body that is no JSON gets 4xx."},
	{ID: "security/not-an-object", Severity: Should, Check: odd(func() string { return `[1,2,3]` }, true),
		Rule: "A body that is JSON but no object gets 4xx."},
	{ID: "security/duplicate-members", Severity: Should, Check: duplicates,
		Rule: "A member that is written twice is refused, or means the same to both engines and the gateway (vLLM " +
			"takes the last)."},
	{ID: "security/http-1.0", Severity: Should, Check: oldClient,
		Rule: "A client of HTTP/1.0 gets a whole answer without chunks, which it cannot read."},
	{ID: "security/keep-alive", Severity: Must, Check: keepAlive,
		Rule: "After an error, the next request of the same connection gets its own answer."},
}

const foreign = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_engine_id":"conform-foreign",` +
	`"remote_host":"127.0.0.1","remote_port":1,"remote_block_ids":[[1,2]],"remote_request_id":"conform-foreign"}`

// noForeign is a breach if an engine got the client's own transfer members.
func (s *Scene) noForeign(ctx context.Context, content string) error {
	asking, stop := context.WithTimeout(ctx, 5*time.Second) // vLLM waits for ever for some of them
	defer stop()
	a := s.post(asking, completions, content)
	for _, l := range append(s.legs(s.P), s.legs(s.D)...) {
		if strings.Contains(string(l.Body), "conform-foreign") {
			return breach("the client's kv_transfer_params at no engine", "they reached one")
		}
	}
	if a.status == 0 || a.status >= http.StatusInternalServerError {
		return breach("the request to be served without them, or refused with 4xx", "%s", a)
	}
	return nil
}

func ownTransfer(ctx context.Context, s *Scene) error {
	return s.noForeign(ctx, strings.Replace(body("kv_transfer_params", "@"), `"@"`, foreign, 1))
}

func ownTransferTwice(ctx context.Context, s *Scene) error {
	plain := strings.TrimSuffix(body(), "}")
	for _, name := range []string{"kv_transfer_params", `kv_transfer_param\u0073`} {
		content := plain + `,"kv_transfer_params":` + foreign + `,"` + name + `":` + foreign + "}"
		if err := s.noForeign(ctx, content); err != nil {
			return err
		}
	}
	return nil
}

func addresses(ctx context.Context, s *Scene) error {
	for _, side := range [][]*enginesim.Engine{s.D, s.P} {
		everywhere(side, enginesim.Fault{Kind: enginesim.FaultRefuse})
		a := s.post(ctx, completions, body())
		for _, url := range urls(s.engines()) {
			if address := strings.TrimPrefix(url, "http://"); strings.Contains(string(a.body), address) {
				return breach("no engine's address in the response", "one, with status %d", a.status)
			}
		}
	}
	return nil
}

// raw sends bytes on a connection of their own, and returns all that comes back until the gateway closes it or falls
// silent.
func (s *Scene) raw(ctx context.Context, text string) (string, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.host())
	if err != nil {
		return "", err
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, text); err != nil {
		return "", err
	}
	var got strings.Builder
	buffer := make([]byte, 64<<10)
	for {
		_ = conn.SetReadDeadline(time.Now().Add(2 * soon))
		n, err := conn.Read(buffer)
		got.Write(buffer[:n])
		if err != nil {
			return got.String(), nil // an end of any kind
		}
	}
}

func (s *Scene) host() string { return strings.TrimPrefix(s.gateway.URL, "http://") }

const head = "POST " + completions + " HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"

// smuggle hides a request in what may be another one's body. The hidden one must have no answer.
func smuggle(format string) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		content := body()
		hidden := fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", head, len(content), content)
		got, err := s.raw(ctx, head+fmt.Sprintf(format, len(hidden), hidden))
		if err != nil {
			return breach("the gateway to listen", "%s", cause(err))
		}
		if n := strings.Count(got, "HTTP/1.1 "); n > 1 {
			return breach("at most one response", "%d: the hidden request was served", n)
		}
		if n := len(s.legs(s.P)) + len(s.legs(s.D)); n > 0 {
			return breach("no leg of the hidden request", "%d", n)
		}
		return nil
	}
}

func large(ctx context.Context, s *Scene) error {
	got, err := s.raw(ctx, head+"Content-Length: 10000000000\r\n\r\n"+strings.Repeat(" ", 64<<10))
	if err == nil && !strings.HasPrefix(got, "HTTP/1.1 4") {
		err = breach("a status of 4xx within 2 s", "%.20q", got)
	}
	return err
}

// odd sends a strange body. Afterwards the gateway must serve.
func odd(content func() string, refuse bool) func(context.Context, *Scene) error {
	return func(ctx context.Context, s *Scene) error {
		a := s.post(ctx, completions, content())
		if a.status == 0 {
			return breach("a response", "%s", a)
		}
		if refuse && (a.status < 400 || a.status >= 500) {
			return breach("a status of 4xx", "%s", a)
		}
		next := body()
		return s.whole(ctx, s.post(ctx, completions, next), completions, next)
	}
}

func duplicates(ctx context.Context, s *Scene) error {
	content := body()
	twice := strings.Replace(content, "{", `{"prompt":"the first of two",`, 1)
	a := s.post(ctx, completions, twice)
	if a.status >= 400 && a.status < 500 {
		return nil
	}
	return s.whole(ctx, a, completions, content)
}

func oldClient(ctx context.Context, s *Scene) error {
	content := body()
	got, err := s.raw(ctx, fmt.Sprintf("%sContent-Length: %d\r\n\r\n%s", strings.Replace(head, "/1.1", "/1.0", 1),
		len(content), content))
	if err != nil {
		return breach("the gateway to listen", "%s", cause(err))
	}
	resp, err := http.ReadResponse(bufio.NewReader(strings.NewReader(got)), nil)
	if err != nil {
		return breach("a response", "none")
	}
	defer resp.Body.Close()
	if len(resp.TransferEncoding) > 0 {
		return breach("no Transfer-Encoding", "%s", resp.TransferEncoding[0])
	}
	text, err := io.ReadAll(resp.Body)
	return s.whole(ctx, answer{status: resp.StatusCode, body: text, err: err}, completions, content)
}

func keepAlive(ctx context.Context, s *Scene) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.host())
	if err != nil {
		return breach("the gateway to listen", "%s", cause(err))
	}
	defer conn.Close()
	if until, ok := ctx.Deadline(); ok {
		_ = conn.SetDeadline(until)
	}
	lines := bufio.NewReader(conn)
	content := body()
	for _, text := range []string{`{"model":`, content} {
		if _, err := fmt.Fprintf(conn, "%sContent-Length: %d\r\n\r\n%s", head, len(text), text); err != nil {
			return nil // the gateway has closed the connection, as it may
		}
		resp, err := http.ReadResponse(lines, nil)
		if err != nil {
			if text == content && (errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed)) {
				return nil // the same
			}
			return breach("a response", "%s", cause(err))
		}
		got, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if text == content {
			return s.whole(ctx, answer{status: resp.StatusCode, body: got, err: err}, completions, content)
		}
	}
	return nil
}
