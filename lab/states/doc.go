// SPDX-License-Identifier: Apache-2.0

// Package states has tests only. They run package pdflow's state machine through every event at every point of the
// legs' exchanges, for each of the four orders, against a ledger of what must never happen:
//
//   - TestEveryEventAtEveryPoint goes through the interleavings and prints their number;
//   - TestTheFaultMatrix writes docs/reliability/faults.md: what a client sees of each fault;
//   - TestRandomSequencesOfEvents drives several requests at once through random events, and shrinks what fails;
//   - TestStreamsGoOnWhereverTheirDFails has D fail in mid-stream, in each of its ways, while rescue is on.
//
// Engines and clients are goroutines on connections in memory, in the bubble of testing/synctest: time is simulated,
// and a run always ends in the same way. A driver lets one engine go on by one point at a time, while everything else
// is blocked, so that an event happens exactly there.
package states
