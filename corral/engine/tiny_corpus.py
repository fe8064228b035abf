"""The text the tiny model's tokenizer learns its merges from: chat markup words and everyday word problems.

It is fixed text on purpose: the tokenizer, and with it every length and every token id of a test run, then depends on
nothing but this file.
"""

from __future__ import annotations

CORPUS = (
    "system user assistant",
    "You are a helpful assistant.",
    'Think step by step and give the final answer after "####".',
    "Anna has 12 apples. She buys 7 more apples at the store. How many apples does she have now?",
    "Ben has 48 marbles and gives 15 of the marbles to his friend. How many marbles are left?",
    "There are 6 boxes with 8 pencils in each box. How many pencils are there altogether?",
    "Tom shares 36 cookies equally among 4 children. How many cookies does each child get?",
    "A farmer sold 3 times as many eggs in May as in April. In April he sold 25 eggs. How many eggs did "
    "he sell in total?",
    "Maria earns $12 an hour. Yesterday she worked 5 hours and then spent half of the money on books and toys.",
    "The price of a ticket is $9. A family of 4 people buys tickets and pays with $50. How much change "
    "do they get back?",
    "Each day a baker makes 20 loaves of bread. After one week, how many loaves will the baker have made?",
    "A train travels 60 miles per hour for 3 hours, and then 40 miles per hour for 2 hours. What is the "
    "total distance?",
    "Sam reads 15 pages every day. If the book has 120 pages, how many days will it take him to finish the book?",
    "In a school there are 240 students. Half of the students are girls, and a third of the girls play football.",
    "John is twice as old as his sister. If the sister is 7 years old, how old will John be in 5 years?",
    "She had 100 stickers, lost 18 of them, and then bought 3 packs of 10 stickers. How many stickers were there?",
    "First, they had 5 + 7 = 12. Then 12 - 4 = 8 remain. So the answer is 8. #### 8",
    "The total number is 6 * 9 = 54. After that there are 54 / 6 = 9 for each of them. Therefore the "
    "result is 9. #### 9",
    "He has to drive to work, which takes 30 minutes, and would like to know how many minutes it takes each month.",
    "The cost of the cake was less than the cost of all the other things that were on the table at the party.",
    "We can find out how much time it takes from the first number: 2 times 45 minutes equals 90 minutes.",
    "Julia, David, Emma, Kevin, Lucy and Peter each have their own garden, where every row of plants "
    "needs 4 gallons of water.",
    "What percent of the people in the room were wearing a hat, given that 15 of the 60 people were wearing one?",
    "Her mother gave her some coins, two dollars, and a small bag of oranges for the week before the summer.",
    "An animal shelter has cats, dogs and birds; the number of dogs is 10 more than the number of cats.",
    "If it costs 25 cents for each pound, how many pounds of rice could they buy when they have 10 dollars?",
)
