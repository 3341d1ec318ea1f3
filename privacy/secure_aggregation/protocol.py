"""Secure sums: the coordinator learns what the sites' numbers add up to, and nothing else of them.

Bonawitz et al. 2017, doi 10.1145/3133956.3133982. One sum takes four exchanges:

    advertise   each site: two fresh X25519 keys and a commitment, signed with the key that the roster has of it
    share       each site: t-of-n shares of its mask key and of its seed, one encrypted parcel for each other site
    mask        each site: numbers + its own mask +- a mask for each other site, modulo 2^bits
    unmask      each survivor: of every survivor a share of the seed, of every dropout a share of the mask key

Between sites that survive, pair masks cancel; the coordinator rebuilds and takes off the rest. As t = floor(2n/3) + 1,
and at least 3, fewer than a third of the sites may drop out: none of 3, one of 4 to 6, two of 7 to 9, six of 20.

What holds, and against whom:
- One sum per attempt, over at least t sites, if the coordinator follows the protocol and reads whatever it sees.
- A coordinator that lies invents no site and replays nothing, and gets the seed *or* the mask key of a site, never
  both, even with fewer than a third of the sites on its side. So it still gets one sum. By telling sites different
  lists of survivors it can shrink that sum below t: with no site on its side not for n < 10, but to 6 of 10 and to 11
  of 20, and always to more than a third; further with sites on its side. (The paper's fifth exchange, in which
  survivors sign the list, would keep it at t.)
- All but one in league know that one's numbers: they subtract their own from the sum. Only noise helps there.
- Wrong numbers are not noticed, nor could they be. Wrong shares are: they are done without, or void the sum.
- Two attempts with the *same* numbers and different survivors give away the difference, which may be a single site's.
  A site that has answered `unmask` must not mask the same numbers again.
"""

from __future__ import annotations

from privacy.ledger.keys import fingerprint
from privacy.secure_aggregation.client import Member
from privacy.secure_aggregation.masking import Segment, narrowest
from privacy.secure_aggregation.server import Gathering
from privacy.secure_aggregation.shamir import FEWEST, threshold

__all__ = ["FEWEST", "Gathering", "Member", "Segment", "fingerprint", "narrowest", "threshold"]
