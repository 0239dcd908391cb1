// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"golang.org/x/term"

	"github.com/pdkit/pdkit/cmd/pdctl/measure"
)

type watchCmd struct {
	Admin string        `default:"http://127.0.0.1:9000" placeholder:"URL" help:"${watch_admin}"`
	Every time.Duration `default:"1s" help:"How often to ask."`
	Once  bool          `help:"Print one picture and end."`
	JSON  bool          `name:"json" help:"Write what the gateway says, as JSON, one picture a line."`
	Rows  int           `default:"20" help:"${watch_rows}"`
	Color string        `enum:"auto,always,never" default:"auto" help:"auto, always or never; auto heeds NO_COLOR."`
}

// picture is what the gateway's /debug/live/live.json says.
type picture struct {
	Time     time.Time  `json:"time"`
	Draining bool       `json:"draining"`
	Models   []modelRow `json:"models"`
	Requests []attempt  `json:"requests"`
}

type modelRow struct {
	Model     string             `json:"model"`
	Ready     bool               `json:"ready"`
	Reason    string             `json:"reason"`
	Connector string             `json:"connector"`
	Phases    map[string]float64 `json:"phases"`
	Totals    struct {
		Served float64            `json:"served"`
		Reused float64            `json:"reused"` // prompt tokens, as responses tell them
		Errors map[string]float64 `json:"errors"`
	} `json:"totals"`
	Endpoints []engineRow   `json:"endpoints"`
	Pairs     []pairRow     `json:"pairs"`
	Admission *admissionRow `json:"admission"` // nil: it is off
	KV        *struct {
		Taken float64 `json:"taken"` // prompt tokens, as engines count them
	} `json:"kv"`
}

type engineRow struct {
	ID      string `json:"id"`
	Role    string `json:"role"`
	Phase   string `json:"phase"`
	Healthy bool   `json:"healthy"`
	State   string `json:"state"` // cooldown, quarantine; "": neither
	Load    int    `json:"load"`
	Recent  struct {
		Marks []struct {
			Word string `json:"word"` // failing, slow …: the worst first
		} `json:"marks"`
	} `json:"recent"` // of the last minute
	Engine *struct {
		Running int     `json:"running"`
		Waiting int     `json:"waiting"`
		KVUsage float64 `json:"kvUsage"`
	} `json:"engine"` // what it says of itself, if the gateway asks
}

// pairRow has its times in ms, means over its last requests.
type pairRow struct {
	Prefill  string   `json:"prefill"`
	Decode   string   `json:"decode"`
	Served   float64  `json:"served"`
	Failed   float64  `json:"failed"`
	Handoff  *float64 `json:"handoff"`
	Transfer *float64 `json:"transfer"` // to the first token
	State    string   `json:"state"`    // as an engine's
}

type admissionRow struct {
	Queued  float64            `json:"queued"`
	Prefill occupancy          `json:"prefill"`
	Decode  occupancy          `json:"decode"`
	Refused map[string]float64 `json:"refused"` // requests, by reason
}

type occupancy struct {
	InFlight float64 `json:"inFlight"`
	Limit    float64 `json:"limit"` // 0: none
}

// attempt has its times in ms since it began.
type attempt struct {
	RequestID    string   `json:"requestId"`
	Mode         string   `json:"mode"`
	Attempt      int      `json:"attempt"`
	PrefillStart *float64 `json:"prefillStart"`
	PrefillEnd   *float64 `json:"prefillEnd"`
	DecodeStart  *float64 `json:"decodeStart"`
	FirstToken   *float64 `json:"firstToken"`
	End          float64  `json:"end"`
	Error        string   `json:"error"`
	Running      bool     `json:"running"`
	Phase        string   `json:"phase"`
}

// maxPicture is the largest response that is read, in bytes.
const maxPicture = 8 << 20

var errNoAnswer = errors.New("does not answer")

// Run prints pictures until it is interrupted.
func (c *watchCmd) Run(s streams) error {
	if c.Every <= 0 || c.Rows < 0 {
		return errors.New("--every and --rows must not be negative, and --every not zero")
	}
	var err error
	if c.Admin, err = baseURL("--admin", c.Admin); err != nil {
		return err
	}
	ctx, stop := interruptible()
	defer stop()
	live := !c.Once && !c.JSON && terminal(s.out)
	opened := false
	var before, last *picture
	for {
		raw, now, err := c.ask(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && (c.Once || last == nil):
			if errors.Is(err, errNoAnswer) {
				err = fmt.Errorf("%w: name the gateway's admin address with --admin", err)
			}
			return err
		case err != nil && !live:
			fmt.Fprintln(s.err, "pdctl:", err)
		case c.JSON:
			_, _ = s.out.Write(append(raw, '\n'))
		case live:
			if !opened {
				_, _ = io.WriteString(s.out, openScreen)
				defer func() { _, _ = io.WriteString(s.out, closeScreen) }()
				opened = true
			}
			if now == nil { // the last picture stays, and its first line tells the error
				_, _ = io.WriteString(s.out, onScreen(c.view(s.out).draw(last, before, err)))
				break
			}
			_, _ = io.WriteString(s.out, onScreen(c.view(s.out).draw(now, last, nil)))
		default:
			if last != nil {
				_, _ = io.WriteString(s.out, "\n")
			}
			_, _ = io.WriteString(s.out, strings.Join(c.view(s.out).draw(now, last, nil), "\n")+"\n")
		}
		if now != nil {
			before, last = last, now
		}
		if c.Once {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(c.Every):
		}
	}
}

// The live view has the terminal's second screen, like less and top, and hides the cursor. It draws over the picture
// before, line by line: an erased screen would flicker.
const (
	openScreen  = "\x1b[?1049h\x1b[?25l\x1b[H\x1b[2J"
	closeScreen = "\x1b[?25h\x1b[?1049l"
)

func onScreen(lines []string) string {
	return "\x1b[H" + strings.Join(lines, "\x1b[K\n") + "\x1b[K\x1b[J"
}

// view is how pictures are drawn on an output. A terminal may change its size at any time.
func (c *watchCmd) view(out io.Writer) *view {
	v := &view{width: 80, rows: c.Rows, colours: c.Color == "always"}
	f, ok := out.(*os.File)
	if !ok || !terminal(out) {
		return v
	}
	if width, height, err := term.GetSize(int(f.Fd())); err == nil && width > 0 && height > 0 {
		v.width, v.height = min(width, 120), height
		if c.Once {
			v.height = 0 // what does not fit scrolls
		}
	}
	v.colours = v.colours || c.Color == "auto" && os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	return v
}

// terminal reports whether an output is one.
func terminal(out io.Writer) bool {
	f, ok := out.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// ask fetches a picture, and its JSON on one line.
func (c *watchCmd) ask(ctx context.Context) ([]byte, *picture, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Admin+"/debug/live/live.json",
		http.NoBody)
	if err != nil {
		return nil, nil, errors.New("--admin is no URL; write one like http://127.0.0.1:9000")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, nil, fmt.Errorf("%s %w: %s", c.Admin, errNoAnswer, measure.Reason(err))
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxPicture))
	if err != nil {
		return nil, nil, fmt.Errorf("the response of %s broke off", c.Admin)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, fmt.Errorf("the gateway answered with status %d: is %s its admin address, by an IP address "+
			"or localhost?", resp.StatusCode, c.Admin)
	}
	now := &picture{}
	line := &bytes.Buffer{}
	if json.Unmarshal(body, now) != nil || json.Compact(line, body) != nil {
		return nil, nil, errors.New("the response is not that of a gateway's live view")
	}
	return line.Bytes(), now, nil
}
